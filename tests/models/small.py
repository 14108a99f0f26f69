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
