"""Policies and requests of `sglang_throughput.py`."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.device_time import device
from benchmarks.gpu.peaked_policy import peaked_policy, random_prompts
from rhymerl.data.prompts import PromptSource
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.rollout import RolloutSettings, requests_of
from rhymerl.tasks import RunningSum
from rhymerl.types import Prompt, RolloutRequest

QUICKSTART = Path(__file__).parents[2] / "rhymerl" / "assets" / "quickstart_policy"


def make_policy(arguments: Namespace) -> Policy:
    if arguments.size is not None:
        policy = peaked_policy(arguments.size, dtype=arguments.dtype, seed=arguments.seed)
    else:
        policy = PolicySource(arguments.model or str(QUICKSTART), dtype=arguments.dtype).load()
    policy.model.eval().to(device())
    return policy


def make_prompts(policy: Policy, arguments: Namespace) -> list[Prompt]:
    if arguments.size is not None:
        return random_prompts(arguments.size, arguments.num_prompts, seed=arguments.seed)
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
