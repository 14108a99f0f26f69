"""Workers whose engines are servers that run already: a thread of the trainer's process speaks with each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.remote.client import NoAnswerError
from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.drafters.wrapped import innermost
from rhymerl.errors import BackendError, ConfigError
from rhymerl.history import HistoryStore
from rhymerl.memory.base import Setup
from rhymerl.models.copies import copy_weights, twin_of
from rhymerl.models.policy import Policy
from rhymerl.models.sharding import is_sharded
from rhymerl.types import Autocast
from rhymerl.workers.messages import Events, HostMessage, WeightSource
from rhymerl.workers.remote.base import Connection, HostedBackend
from rhymerl.workers.remote.host import WorkerHost

if TYPE_CHECKING:
    from rhymerl.backends.sglang.backend import SGLangBackend

_CLOSE_S = 10.0
_AGAIN_S = 2.0  # between two looks for a server that was lost


def copied(named_tensors: Iterable[tuple[str, Tensor]]) -> WeightSource:
    """Return copies in the host's memory."""
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named_tensors}
    return lambda: tensors


class ThreadConnection(Connection):
    """A host in this process. Errors of the kinds `lost` mean that its engine is gone."""

    def __init__(
        self,
        host: WorkerHost,
        *,
        lockstep: bool,
        lost: tuple[type[Exception], ...] = (),
        killed: threading.Event | None = None,
    ) -> None:
        self._host = host
        self._lost = lost
        self._killed = killed or threading.Event()
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
        if self._killed.is_set():
            raise ConnectionError("it was killed")
        if isinstance(events.error, self._lost):
            raise ConnectionError(str(events.error))
        return events

    def kill(self) -> None:
        self._killed.set()
        self._host.close()
        self._pool.shutdown(wait=False)

    def join(self, timeout_s: float) -> None:
        """Wait until its engine has stopped."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        else:  # in lockstep nobody but the pool has worked with it
            self._pool.shutdown()
            self._host.release()


class PolicyCopies:
    """Copies of a policy with published weights: one for all servers that connect with the same version of them.

    They are on the policy's device; in the host's memory where that device has a part of the policy only, though
    engines compute and get weights as the policy's device says.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._newest: tuple[int, Policy] | None = None
        self._lock = threading.Lock()

    def of(self, version: int, tensors: Mapping[str, Tensor]) -> Policy:
        with self._lock:
            if self._newest is None or self._newest[0] != version:
                made = twin_of(self.policy, in_host=is_sharded(self.policy.model))
                copy_weights(made.model, tensors.items())
                self._newest = version, made
            return self._newest[1]


@dataclass(slots=True, kw_only=True)
class ServerLoader:
    """Connects to a server with the first weights, and hands it later ones.

    A server is compared with the policy then, which has these weights and rests; with a copy where it `is_late`, or the
    policy is sharded.
    """

    engine: SGLangBackend
    copies: PolicyCopies
    drafter: Drafter
    budget: Budget | None
    is_late: bool
    killed: threading.Event = field(default_factory=threading.Event)
    _is_up: bool = field(default=False, init=False)

    def __call__(self, source: WeightSource, version: int) -> RolloutBackend:
        tensors = source()
        if not self._is_up:
            policy = self.copies.policy
            rests = not self.is_late and not is_sharded(policy.model)
            self._connect(policy if rests else self.copies.of(version, tensors))
        self.engine.sync_weights(tensors.items(), version)
        return self.engine

    def _connect(self, policy: Policy) -> None:
        while not self._is_up:
            try:
                self.engine.start(policy, self.drafter, budget=self.budget)
                self._is_up = True
            except BackendError:
                if not self.is_late or self.killed.wait(_AGAIN_S):
                    raise


class ServersBackend(HostedBackend):
    """Every server of `backend` is a worker; one that stops answering is polled until it returns, as others go on."""

    starts_together = True
    goes_on_short = True

    def __init__(self, backend: SGLangBackend) -> None:
        self.backend = backend
        self.draws_exactly = backend.draws_exactly
        self.max_running = backend.max_running
        self._servers: Sequence[SGLangBackend] | None = None
        self._connections: list[ThreadConnection] = []
        self._known: set[int] = set()  # numbers of workers that were connected once

    def check(self, longest_tokens: int) -> None:
        self.backend.check(longest_tokens)

    def check_drafting(self, drafter: Drafter, budget: Budget | None) -> None:
        self.backend.check_drafting(drafter, budget)

    def share_device(self, setup: Setup | None) -> None:
        self.backend.share_device(None)

    def start(
        self, policy: Policy, drafter: Drafter, *, budget: Budget | None = None, autocast: Autocast = nullcontext
    ) -> None:
        self._parts = PolicyCopies(policy), drafter, budget
        self.remembers = not isinstance(innermost(drafter), NoDrafter)

    def num_workers(self, num_ranks: int) -> int:
        """Return how many servers there are."""
        if self._servers is None:
            self._servers = self.backend.servers()
        return len(self._servers)

    def reserve(self, num_workers: int) -> None:
        found = self.num_workers(1)
        if num_workers != found:
            raise ConfigError(
                f"workers={num_workers}: every server of backend.url is a worker; expected {found}, or null"
            )

    def connect(self, number: int, *, lockstep: bool) -> ThreadConnection:
        assert self._servers is not None
        copies, drafter, budget = self._parts
        load = ServerLoader(
            engine=copy(self._servers[number]),
            copies=copies,
            drafter=drafter,
            budget=budget,
            is_late=number in self._known,
        )
        self._known.add(number)
        host = WorkerHost(load, history=HistoryStore(max_tokens=load.engine.history_tokens))
        connection = ThreadConnection(host, lockstep=lockstep, lost=(NoAnswerError,), killed=load.killed)
        self._connections.append(connection)
        return connection

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]]) -> WeightSource:
        return copied(named_tensors)

    def close(self) -> None:
        for connection in self._connections:
            connection.kill()
        for connection in self._connections:
            connection.join(_CLOSE_S)
        self._connections, self._servers, self._known = [], None, set()
