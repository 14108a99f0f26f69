"""The interface of backends whose engines live apart from the trainer's ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future

from torch import Tensor

from rhymerl.backends.base import Backend
from rhymerl.workers.messages import Events, HostMessage, WeightSource


class Connection(ABC):
    """The way to one worker's host. A worker that is gone makes the futures raise OSError or a subclass of it."""

    @abstractmethod
    def post(self, message: HostMessage) -> None:
        """Send a message without waiting; messages arrive in order. Never raises for a worker that is gone."""

    @abstractmethod
    def poll(self, wait_s: float) -> Future[Events]:
        """Ask what is new, of a host that works by itself; it waits so long for something. One at a time."""

    @abstractmethod
    def step(self, ticks: int, *, only_evaluates: bool = False) -> Future[Events]:
        """Let a host in lockstep take its messages and go on for so many ticks; returns what is new. A tick is a pass.

        A host that `only_evaluates` leaves the requests of training steps where they are.
        """

    def is_alive(self, wait_s: float) -> bool:
        """Return whether the worker answers within so long while it does something else; True where nobody can ask."""
        return True

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once; may be called twice."""


class HostedBackend(Backend):
    """Brings up workers by number, each with an engine of its own. `start` only takes down what they are made of."""

    workers_are_remote = True
    start_timeout_s: float = 300.0  # until a worker has to be there
    hang_timeout_s: float = 30.0  # without an answer it counts as lost
    remembers = True  # whether its drafter wants past answers
    learns = False  # whether its drafter wants scored answers
    starts_together = False  # whether the first weights wait for all workers; later ones never do
    ticks_per_exchange = 16  # with workers in lockstep
    goes_on_short = False  # whether a run goes on without a late worker that does not come up

    def num_workers(self, num_ranks: int) -> int:
        """Return how many there are where nothing else is wanted; called on rank 0 only."""
        return num_ranks

    def ticks_of_update(self, num_exchanges: int) -> int:
        """Return the ticks of workers in lockstep during the update, after a step of `num_exchanges` exchanges."""
        return max(num_exchanges // 2, 1) * self.ticks_per_exchange

    def reserve(self, num_workers: int) -> None:
        """Raise ConfigError if there can never be so many workers; called once before the first `connect`."""

    def why_absent(self) -> str:
        """Return what may keep a worker from coming up, in some words; empty where that is not known."""
        return ""

    @abstractmethod
    def connect(self, number: int, *, lockstep: bool) -> Connection:
        """Start a worker; returns at once. Called on rank 0 only, and again for a worker that was lost.

        A host in lockstep does nothing by itself.
        """

    @abstractmethod
    def publish(self, named_tensors: Iterable[tuple[str, Tensor]]) -> WeightSource:
        """Copy weights to where workers can load them; the ones before may be dropped."""
