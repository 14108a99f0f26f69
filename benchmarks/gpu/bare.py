"""The parts that the scripts of `gpu.py` share which need neither SGLang nor a configuration."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.gpu.device_time import device
from benchmarks.gpu.peaked_policy import SIZES, peaked_policy, random_prompts
from rhymerl.engine.engine import Engine
from rhymerl.models.policy import Policy
from rhymerl.rollout import RolloutSettings, requests_of
from rhymerl.types import Completion, RolloutRequest, Sample

GROUP_SIZE = 8


def options(description: str | None, **own: Any) -> argparse.ArgumentParser:
    """A parser with the options of scripts in which a policy answers, and their own by their defaults."""
    parser = record.options(description, tokens=128, dtype=str, **own)
    parser.add_argument("--size", choices=list(SIZES), default="0.5B")
    return parser


@lru_cache(maxsize=1)
def policy_of(size: str, dtype: str | None, seed: int) -> Policy:
    """Return a policy of random weights on the GPU, where there is one: in bfloat16 there, or as it is said."""
    policy = peaked_policy(size, dtype=dtype or ("bfloat16" if device() == "cuda" else "float32"), seed=seed)
    policy.model.eval()
    return policy


def requests(policy: Policy, count: int, arguments: argparse.Namespace, step: str) -> list[RolloutRequest]:
    """Return `count` requests in groups of at most eight; the prompts are the same at each step."""
    size = min(GROUP_SIZE, count)
    prompts = random_prompts(arguments.size, -(-count // size), seed=arguments.seed)
    rollout = RolloutSettings(group_size=size, max_tokens=arguments.tokens, temperature=1.0)
    found = requests_of(prompts, step, rollout, seed=arguments.seed, stop_token_ids=policy.stop_token_ids)
    return found[:count]


def answers(engine: Engine, requests: Sequence[RolloutRequest]) -> list[Completion]:
    """Return all answers, in the order of the requests."""
    engine.submit(requests)
    done: dict[str, Completion] = {}
    while engine.has_work:
        done.update((each.request.id, each) for each in engine.run())
    return [done[request.id] for request in requests]


def sample(completion: Completion, reward: float = 0.0) -> Sample:
    mask = np.ones(len(completion.token_ids), np.bool_)
    return Sample(completion=completion, text="", reward=reward, rewards={}, loss_mask=mask)


def share_equal(one: Sequence[Completion], other: Sequence[Completion]) -> float:
    """Return the share of answers with the same tokens."""
    pairs = zip(one, other, strict=True)
    return float(np.mean([np.array_equal(a.token_ids, b.token_ids) for a, b in pairs]))
