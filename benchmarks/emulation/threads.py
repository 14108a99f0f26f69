"""Workers in threads of this process, each with an engine of its own: for tests, and for devices that are emulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import deepcopy

from torch import Tensor

from rhymerl.backends.base import RolloutBackend
from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.drafters.wrapped import innermost, listens
from rhymerl.history import HistoryStore
from rhymerl.models.copies import twin_of
from rhymerl.models.lora import is_adapted
from rhymerl.models.policy import Policy
from rhymerl.models.sharding import is_sharded
from rhymerl.types import Autocast
from rhymerl.workers.messages import WeightSource
from rhymerl.workers.remote.base import Connection, HostedBackend
from rhymerl.workers.remote.host import EngineLoader, WorkerHost
from rhymerl.workers.remote.publishing import Publisher
from rhymerl.workers.remote.servers import ThreadConnection, copied

_CLOSE_S = 10.0


class ThreadBackend(HostedBackend):
    """`make` gives the engine of each worker by its number; each has copies of policy, drafter and budget."""

    counts_passes = True

    def __init__(self, make: Callable[[int], RolloutBackend]) -> None:
        self.make = make
        self.connections: list[ThreadConnection] = []

    def start(
        self, policy: Policy, drafter: Drafter, *, budget: Budget | None = None, autocast: Autocast = nullcontext
    ) -> None:
        is_whole = not is_sharded(policy.model) and not is_adapted(policy.model)  # else it takes no published weights
        self._parts = policy if is_whole else twin_of(policy), drafter, budget, autocast
        self._publisher = Publisher(policy.model, copied)
        self.remembers = not isinstance(innermost(drafter), NoDrafter)
        self.learns = listens(drafter, "learn")

    def connect(self, number: int, *, lockstep: bool) -> Connection:
        load = self.load(number)
        host = WorkerHost(load, history=HistoryStore(), budget=load.budget)
        connection = ThreadConnection(host, lockstep=lockstep)
        self.connections.append(connection)
        return connection

    def load(self, number: int) -> EngineLoader:
        """Return what gives a worker its engine."""
        policy, drafter, budget, autocast = self._parts
        return EngineLoader(
            make_policy=lambda: deepcopy(policy),
            engine=self.make(number),
            drafter=deepcopy(drafter),
            budget=deepcopy(budget),
            autocast=autocast,
        )

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]]) -> WeightSource:
        return self._publisher.publish(named_tensors)

    def close(self) -> None:
        for connection in self.connections:
            connection.kill()
        for connection in self.connections:
            connection.join(_CLOSE_S)
        self.connections = []
