"""Small models of families whose layers are not those of Llama: windows, soft caps, sinks, latents, chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tests.models.small import LATENT, small_model

_EVERY_OTHER = {"layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
# By model type; a prompt is longer than the window.
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {},
    "ministral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {
        **_EXPERTS,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "phimoe": {**_EXPERTS, "router_jitter_noise": 0.0},
    "gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0},
    "gemma3_text": {
        "query_pre_attn_scalar": 8,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "olmo3": _EVERY_OTHER,
    "cohere2": {"sliding_window_pattern": 2, "logit_scale": 0.5},
    "exaone4": {"sliding_window_pattern": 2},
    "gpt_oss": _EXPERTS,
}
_LATENT = {**LATENT, "v_head_dim": 12, "moe_intermediate_size": 16, "experts_implementation": "eager"}
# Keys and values are computed from what is cached: a narrower vector, or (JetMoE) those of fewer heads.
LATENTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 1},
    "glm4_moe_lite": _LATENT,
    "longcat_flash": {**_LATENT, "num_layers": 2, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "moe_topk": 2},
    "minicpm3": {**_LATENT, "scale_emb": 1, "dim_model_base": 48},
    "jetmoe": {"num_local_experts": 2, "num_experts_per_tok": 1, "kv_channels": 8, "experts_implementation": "eager"},
}
# Its layers have chunks, or no rope and queries that grow with their positions.
CHUNKED: dict[str, dict[str, Any]] = {
    "llama4_text": {
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "attention_chunk_size": 4,
        "no_rope_layers": [1, 0],
        "floor_scale": 5,
        "attn_scale": 0.7,
    }
}
FAMILIES = {**WINDOWED, **LATENTS, **CHUNKED}


def windowed_model(
    model_type: str, *, dtype: torch.dtype = torch.float64, sliding_window: int = 4, **settings: Any
) -> PreTrainedModel:
    """A model whose distributions are neither flat nor one-hot; its sinks are no zeros."""
    torch.manual_seed(0)
    window = {"sliding_window": sliding_window} if model_type in WINDOWED else {}
    own = {**FAMILIES[model_type], **window, "max_position_embeddings": 256, **settings}
    model = small_model(model_type, dtype=dtype, initializer_range=0.3, **own)
    return model.eval()


class InDouble(TorchFunctionMode):
    """Keep float64 where transformers goes down to float32, whose rounding would hide differences."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = [torch.float64 if each is torch.float32 else each for each in args]
            kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in kwargs.items()}
        return func(*args, **kwargs)
