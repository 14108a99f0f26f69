"""Policies and requests of `sglang_throughput.py`."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rhymerl.data.prompts import PromptSource
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.rollout import RolloutSettings, requests_of
from rhymerl.tasks import RunningSum
from rhymerl.testing import make_prompt
from rhymerl.types import Prompt, RolloutRequest

QUICKSTART = Path(__file__).parent.parent / "rhymerl" / "assets" / "quickstart_policy"
SIZES: Mapping[str, Mapping[str, int]] = {  # of Qwen2.5; the last is for tests
    "0.5B": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "intermediate_size": 4864,
    },
    "1.5B": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "intermediate_size": 8960,
    },
    "7B": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18_944,
    },
    "tiny": {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    },
}
WORDS = 1000  # tokens that a random policy uses
PEAKED = 16.0  # the standard deviation of their logits: 0.4 nats a token
PROMPT_TOKENS = 32  # of a random policy's prompts


def make_policy(arguments: Namespace) -> Policy:
    if arguments.size is not None:
        policy = peaked_policy(arguments.size, dtype=arguments.dtype, seed=arguments.seed)
    else:
        policy = PolicySource(arguments.model or str(QUICKSTART), dtype=arguments.dtype).load()
    policy.model.eval().to(device())
    return policy


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def peaked_policy(size: str, *, dtype: Any, seed: int) -> Policy:
    """Random weights, of which the head knows few tokens and is sure of them; an answer never ends by itself.

    What comes next depends on the last tokens most, so that an answer that has left an earlier one finds back to it.
    """
    init = {"model_type": "qwen2", "num_key_value_heads": 2, "max_position_embeddings": 4096}
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


def make_prompts(policy: Policy, arguments: Namespace) -> list[Prompt]:
    if arguments.size is not None:
        source = np.random.default_rng(arguments.seed)
        tokens = source.integers(2, SIZES[arguments.size]["vocab_size"], (arguments.num_prompts, PROMPT_TOKENS))
        return [make_prompt(row.tolist(), id=str(number)) for number, row in enumerate(tokens)]
    task = RunningSum(train_size=arguments.num_prompts, seed=arguments.seed)
    source = PromptSource(arguments.prompts, task=task)
    return source.read(policy, max_tokens=arguments.max_tokens)[: arguments.num_prompts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Requests by round, from the seed alone."""

    prompts: Sequence[Prompt]
    rollout: RolloutSettings
    stop_token_ids: tuple[int, ...]
    seed: int
    answers_per_slot: int

    def epoch(self, number: int) -> list[RolloutRequest]:
        """Every prompt's group."""
        return self._requests(self.prompts, f"epoch {number}")

    def round(self, number: int, running: int) -> list[RolloutRequest]:
        """The groups of prompts chosen for this round, so many that each slot has several answers to give."""
        name = f"round {number} of {running}"
        groups = -(-self.answers_per_slot * running // self.rollout.group_size)
        chosen = random.Random(f"{self.seed}/{name}").sample(self.prompts, min(groups, len(self.prompts)))
        return self._requests(chosen, name)

    @property
    def answers_an_epoch(self) -> int:
        return len(self.prompts) * self.rollout.group_size

    def _requests(self, prompts: Sequence[Prompt], name: str) -> list[RolloutRequest]:
        return requests_of(prompts, name, self.rollout, seed=self.seed, stop_token_ids=self.stop_token_ids)
