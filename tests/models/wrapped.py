"""Small models whose config wraps that of a language model beside a tower for images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from rhymerl.models.tokenizers import character_tokenizer
from rhymerl.models.wrapped import auto_class
from tests.models.small import SMALL

TEXT = {**SMALL, "max_position_embeddings": 64, "initializer_range": 0.3}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
THREE_AXES = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
# By type: the class of the whole model, the text's settings beside TEXT, the tower's.
WRAPPED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", {"sliding_window": 4, "query_pre_attn_scalar": 8}, TOWER),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "sliding_window": 4},
        {"model_type": "pixtral", **TOWER},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {"rope_parameters": {**THREE_AXES, "mrope_interleaved": True}},
        {**QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {**LINEAR, "rope_parameters": {**THREE_AXES, "mrope_interleaved": True}},
        {**QWEN_TOWER, "num_position_embeddings": 16},
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {"num_local_experts": 2, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 64},
        {
            **TOWER,
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    ),
    "smolvlm": ("SmolVLMForConditionalGeneration", {"model_type": "llama"}, TOWER),
}


def wrapped_model(model_type: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    _, text, tower = WRAPPED[model_type]
    config = AutoConfig.for_model(model_type, text_config={**TEXT, **text}, vision_config=tower)
    torch.manual_seed(0)
    model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype)
    return model


def save_wrapped(model_type: str, folder: Path) -> Path:
    """Write a checkpoint of such a model, with a file that says how images come in."""
    model = wrapped_model(model_type)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    character_tokenizer("0123456789+=;#? \n").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"do_resize": true}')
    return folder
