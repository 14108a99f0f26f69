"""Policies of random weights in the shapes of Qwen2.5, whose answers repeat as those of a trained policy do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.device_time import device
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.testing import make_prompt
from rhymerl.types import Prompt

_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "intermediate_size"),
)
SIZES: Mapping[str, Mapping[str, int]] = {  # of Qwen2.5; the last is for tests
    size: dict(zip(_FIELDS, shape, strict=True))
    for size, shape in {
        "0.5B": (151_936, 896, 24, 14, 2, 4864),
        "1.5B": (151_936, 1536, 28, 12, 2, 8960),
        "7B": (152_064, 3584, 28, 28, 4, 18_944),
        "tiny": (100, 32, 2, 4, 2, 64),
    }.items()
}
PROMPT_TOKENS = 32  # of a random prompt
WORDS = 1000  # tokens that a random policy uses
PEAKED = 16.0  # the standard deviation of their logits: 0.4 nats a token


def peaked_policy(size: str, *, dtype: Any, seed: int) -> Policy:
    """Random weights, of which the head knows few tokens and is sure of them; an answer never ends by itself.

    What comes next depends on the last tokens most, so that an answer that has left an earlier one finds back to it.
    """
    init = {"model_type": "qwen2", "max_position_embeddings": 4096}
    source = PolicySource(init={**init, **SIZES[size], "tie_word_embeddings": False}, dtype=dtype, seed=seed)
    with torch.device(device()):  # a CPU takes more than a minute for 7B
        policy = source.load()
    random_source = torch.Generator(device()).manual_seed(seed)
    head, special = policy.model.get_output_embeddings().weight, max(policy.stop_token_ids) + 1
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.normal_(std=1.0, generator=random_source)  # beside what layers add
        # Before the head a state has entries of size 1; the logits of other tokens stay below 1.
        head[special : special + WORDS].normal_(std=PEAKED / head.shape[1] ** 0.5, generator=random_source)
    return policy


def random_prompts(size: str, count: int, *, seed: int) -> list[Prompt]:
    """Return prompts for a policy of that size."""
    tokens = np.random.default_rng(seed).integers(2, SIZES[size]["vocab_size"], (count, PROMPT_TOKENS))
    return [make_prompt(row.tolist(), id=str(number)) for number, row in enumerate(tokens)]
