"""Other engines beside a run's own: they answer the requests of its steps with the same weights, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any, Generic, NamedTuple, TypeVar

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import Budget
from rhymerl.drafters import Drafter
from rhymerl.rollout import requests_of
from rhymerl.training.module import RhymeModule
from rhymerl.types import RolloutRequest

Name = TypeVar("Name", bound=Hashable)
_WARM_UP = 16  # passes after an update, for which whoever comes first would need twice as long


class Taken(NamedTuple):
    """What an engine's rollout of a step took."""

    seconds: float
    tokens: int


class Beside(Generic[Name]):
    """The engines by name, which `start` makes at the first step; used from within a training. Their order turns from step to step."""

    def __init__(self, names: Sequence[Name], start: Callable[[RhymeModule, Name], EmbeddedBackend]) -> None:
        self.names = list(names)
        self.backends: dict[Name, EmbeddedBackend] = {}
        self._start = start
        self._num_steps = 0

    def answer(self, module: RhymeModule, prompts: Any) -> dict[Name, Taken]:
        """Let all of them answer a step's prompts, before the run does."""
        if not self.backends:
            self.backends = {name: self._start(module, name) for name in self.names}
        step, stops = module.num_rollouts, module.policy.stop_token_ids
        requests = requests_of(prompts, step, module.rollout, seed=module.seed, stop_token_ids=stops)
        turn = self._num_steps % len(self.names)
        self._num_steps += 1
        self._warm_up(self.backends[self.names[turn]], requests, step)
        taken = {}
        for name in self.names[turn:] + self.names[:turn]:
            backend = self.backends[name]
            backend.sync_weights([], policy_version=step)
            backend.follow(module.history)
            started, done = time.perf_counter(), []
            backend.submit(requests)
            while len(done) < len(requests):
                done += backend.collect()
            taken[name] = Taken(time.perf_counter() - started, sum(len(each.token_ids) for each in done))
            backend.metrics()
        return taken

    def _warm_up(self, backend: EmbeddedBackend, requests: Sequence[RolloutRequest], step: int) -> None:
        backend.sync_weights([], policy_version=step)
        backend.submit(requests)
        backend.collect(max_passes=_WARM_UP)
        backend.withdraw()
        backend.metrics()


def started(
    stack: ExitStack, module: RhymeModule, drafter: Drafter, budget: Budget, *, max_running: int, kv_tokens: int
) -> EmbeddedBackend:
    """Return an engine with the module's policy, which `stack` ends."""
    backend = stack.enter_context(EmbeddedBackend(max_running=max_running, kv_tokens=kv_tokens))
    autocast = module.trainer.precision_plugin.forward_context
    backend.start(module.policy, drafter, budget=budget, autocast=autocast)
    return backend
