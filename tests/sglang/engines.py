"""Real SGLang engines on the CPU for the tests of this folder, and what is asked of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.budgets import Budget, FixedBudget
from rhymerl.drafters import Drafter, NoDrafter
from rhymerl.history import Answer, HistoryStore
from rhymerl.models.policy import Policy
from rhymerl.testing import make_answer
from rhymerl.types import Completion, RolloutRequest
from tests.sglang.conftest import CpuEngine

Answers = dict[str, Completion]


def sglang(**settings: Any) -> SGLangBackend:
    """Return a backend with seven draft nodes a request, where there is a drafter."""
    engine = CpuEngine()
    on_cpu = {"arguments": engine.arguments, "environment": engine.environment}
    return SGLangBackend(**{"nodes": 7, "max_running": 16, **on_cpu, **settings})


def started(
    backend: RolloutBackend, policy: Policy, drafter: Drafter | None = None, budget: Budget | None = None
) -> RolloutBackend:
    """Running, with the policy's weights as version 0; its threads are there before a test looks for new ones.

    Without a budget SGLang verifies its most nodes in every pass.
    """
    if budget is None and isinstance(backend, SGLangBackend) and backend.nodes is not None:
        budget = FixedBudget(backend.nodes)
    backend.start(policy, drafter or NoDrafter(), budget=budget)
    backend.sync_weights(policy.model.named_parameters(), 0)
    if isinstance(backend, SGLangBackend):
        threads = backend.in_flight.threads
        everybody = threading.Barrier(threads._max_workers + 1)
        for _ in range(threads._max_workers):
            threads.submit(everybody.wait)
        everybody.wait()
    return backend


def answered(backend: RolloutBackend, requests: Sequence[RolloutRequest]) -> Answers:
    """All of them, by request id."""
    backend.submit(requests)
    done: Answers = {}
    while len(done) < len(requests):
        done.update((completion.request.id, completion) for completion in backend.collect())
    return done


def embedded(policy: Policy, requests: Sequence[RolloutRequest]) -> Answers:
    """Return the answers of our own engine."""
    with EmbeddedBackend() as backend:
        return answered(started(backend, policy), requests)


def equal(one: Answers, two: Answers) -> float:
    """The share of requests with the same tokens."""
    assert one.keys() == two.keys()
    return float(np.mean([np.array_equal(one[each].token_ids, two[each].token_ids) for each in one]))


def remember(history: HistoryStore, answers: Mapping[str, Completion], epoch: int = 0) -> None:
    """Put the answers into the history, by prompt."""
    groups: dict[str, list[Completion]] = {}
    for answer in answers.values():
        groups.setdefault(answer.request.prompt.key, []).append(answer)
    for group in groups.values():
        history.add(group[0].request.prompt, [_past(answer, epoch) for answer in group])


def _past(answer: Completion, epoch: int) -> Answer:
    assert answer.finish_reason != "withdrawn"
    sample = answer.request.sample
    return make_answer(answer.token_ids, reward=1.0, finish_reason=answer.finish_reason, epoch=epoch, sample=sample)


def largest_difference(one: Answers, two: Answers) -> float:
    """Return the largest difference between the log-probs of requests whose tokens are the same."""
    return max(_differences(one, two))


def _differences(one: Answers, two: Answers) -> Iterable[float]:
    for name, answer in one.items():
        if np.array_equal(answer.token_ids, two[name].token_ids):
            yield float(np.abs(answer.logprobs - two[name].logprobs).max(initial=0.0))
