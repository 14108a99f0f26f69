"""Hosts in threads of the trainer's process: for engines that are servers already, and for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass

from torch import Tensor

from rhymerl.backends.base import RolloutBackend
from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.drafters.run_ahead import innermost, listens
from rhymerl.history import HistoryStore
from rhymerl.models.copies import twin_of
from rhymerl.models.lora import is_adapted
from rhymerl.models.policy import Policy
from rhymerl.models.sharding import is_sharded
from rhymerl.types import Autocast
from rhymerl.workers.messages import Events, HostMessage, WeightSource
from rhymerl.workers.remote.base import Connection, HostedBackend
from rhymerl.workers.remote.host import WorkerHost
from rhymerl.workers.remote.loading import EngineLoader
from rhymerl.workers.remote.publishing import Publisher

_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedWeights(WeightSource):
    """Weights in this process's memory."""

    tensors: Mapping[str, Tensor]

    def load(self) -> Mapping[str, Tensor]:
        return self.tensors


def copied(named_tensors: Iterable[tuple[str, Tensor]]) -> CopiedWeights:
    """Return copies in the host's memory."""
    return CopiedWeights(tensors={name: tensor.detach().to("cpu", copy=True) for name, tensor in named_tensors})


class ThreadConnection(Connection):
    """A host in this process. Errors of the kinds `lost` mean that its engine is gone."""

    lost: tuple[type[Exception], ...] = ()

    def __init__(self, host: WorkerHost, *, lockstep: bool) -> None:
        self._host = host
        self._is_killed = False
        self._pool = ThreadPoolExecutor(1)
        self._thread = threading.Thread(target=host.run, daemon=True)
        if not lockstep:
            self._thread.start()

    def post(self, message: HostMessage) -> None:
        self._host.post(message)

    def poll(self, wait_s: float) -> Future[Events]:
        return self._asked(lambda: self._host.poll(wait_s))

    def step(self, ticks: int, *, only_evaluates: bool = False) -> Future[Events]:
        return self._asked(lambda: self._host.step(ticks, only_evaluates=only_evaluates))

    def _asked(self, ask: Callable[[], Events]) -> Future[Events]:
        try:
            return self._pool.submit(self._told, ask)
        except RuntimeError:  # the pool is closed
            gone: Future[Events] = Future()
            gone.set_exception(ConnectionError("it was killed"))
            return gone

    def _told(self, ask: Callable[[], Events]) -> Events:
        events = ask()
        if self._is_killed:
            raise ConnectionError("it was killed")
        if isinstance(events.error, self.lost):
            raise ConnectionError(str(events.error))
        return events

    def kill(self) -> None:
        self._is_killed = True
        self._host.close()
        self._pool.shutdown(wait=False)

    def join(self, timeout_s: float) -> None:
        """Wait until its engine has stopped."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        else:  # in lockstep nobody but the pool has worked with it
            self._pool.shutdown()
            self._host.release()


class ThreadBackend(HostedBackend):
    """`make` gives the engine of each worker by its number; each has copies of policy, drafter and budget."""

    counts_passes = True

    def __init__(self, make: Callable[[int], RolloutBackend]) -> None:
        self.make = make
        self.connections: list[ThreadConnection] = []

    def start(
        self, policy: Policy, drafter: Drafter, *, budget: Budget | None = None, autocast: Autocast = nullcontext
    ) -> None:
        self._parts = _whole(policy), drafter, budget, autocast
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


def _whole(policy: Policy) -> Policy:
    """Return a policy that can be copied and takes the weights that are published."""
    model = policy.model
    if not is_sharded(model) and not is_adapted(model):
        return policy
    return twin_of(policy)
