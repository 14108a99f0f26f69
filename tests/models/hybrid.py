"""Small models of families with recurrent layers beside attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from tests.models.small import small_model

_DELTA_NET = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "experts_implementation": "eager",
}
_CONVOLUTIONS = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1},
    "qwen3_next": {**_DELTA_NET, **_EXPERTS},
    "qwen3_5_text": _DELTA_NET,
    "olmo_hybrid": {**_DELTA_NET, "linear_num_key_heads": 4},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 32,
    },
    "bamba": {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 16,
    },
}


def hybrid_model(model_type: str, *, dtype: torch.dtype = torch.float64, **settings: Any) -> PreTrainedModel:
    """A model whose distributions are neither flat nor one-hot, and whose states are kept for some tokens."""
    torch.manual_seed(0)
    own = {**HYBRIDS[model_type], "max_position_embeddings": 512, **settings}
    model = small_model(model_type, dtype=dtype, initializer_range=0.3, **own)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.linspace(0.05, 0.8, len(weight)).log())
            if "conv" in name and weight.ndim == 3:
                weight.normal_()
    return model.eval()
