"""Small models of any family, at their own random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 19,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
# Of an attention whose keys and values are computed from a narrower vector.
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}


def small_model(model_type: str, *, dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    """A model of these and of its family's own settings."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **settings}), dtype=dtype)


def with_other_heads_by_layer() -> PreTrainedModel:
    """A Gemma 4 whose layers with windows have 1 head of keys of 8 numbers, and the others 2 of 16."""
    torch.manual_seed(0)
    return small_model(
        "gemma4_text",
        dtype=torch.float64,
        initializer_range=0.3,
        max_position_embeddings=256,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        vocab_size_per_layer_input=19,
        hidden_size_per_layer_input=8,
        num_key_value_heads=1,
        num_global_key_value_heads=2,
        global_head_dim=16,
        attention_k_eq_v=True,
    ).eval()
