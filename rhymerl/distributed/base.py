"""The interface between the processes that train together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Something for one rank."""

    to: int
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Received messages: rank 0's commands, in the same order on all ranks, and the messages for this rank."""

    commands: list[Any]
    messages: list[Any]


Decide = Callable[[list[tuple[int, Any]]], Any]  # (rank, report) since the last time -> a command for all, or None


class Channel(ABC):
    """The channel between ranks at work: reports go to rank 0, its commands to all ranks, messages to one rank."""

    @abstractmethod
    def exchange(self, report: Any, messages: Sequence[Message], decide: Decide, *, waits: bool) -> Received:
        """Send this rank's report (None: nothing) and messages, and receive what has arrived for it.

        Rank 0 calls `decide`; the command may be among what is returned already. A rank with nothing else to do
        `waits` a moment for some.
        """

    def close(self) -> None:
        """End the work. Called after a collective, so that nobody reads any more."""


class Ranks(ABC):
    """This process is `rank` of `size`.

    Methods are collectives unless they say otherwise: all ranks call them, in the same order. A rank that ends while
    others wait for it makes them raise RunError, which says which one and why.
    """

    rank: int
    size: int

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on every rank: plain data, numpy arrays, records that ranks know."""

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank; the other ranks' values are ignored."""

    @abstractmethod
    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum each parameter's gradient over the ranks in place; a missing one is zeros, unless no rank has it."""

    @abstractmethod
    def channel(self, *, lockstep: bool) -> Channel:
        """Return a new channel for a piece of work; in lockstep, exchanges are collectives and repeat bit for bit."""

    def check(self) -> None:
        """Raise RunError when a rank has ended. No collective: called wherever a rank waits or works for long."""

    def fail(self, reason: str) -> None:
        """End this rank with an error, which the other ranks report too. No collective."""

    def explain(self, error: BaseException) -> None:
        """Add to an error which rank has ended, if that broke the connection. May wait some seconds for it."""

    def close(self) -> None:
        """End this rank's part; may be called twice. No collective."""


class LockstepChannel(Channel):
    """A channel on which every exchange is a collective, so no rank runs ahead of another."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def exchange(self, report: Any, messages: Sequence[Message], decide: Decide, *, waits: bool) -> Received:
        everything = self._ranks.gather((report, list(messages)))
        reports = [(rank, said) for rank, (said, _) in enumerate(everything) if said is not None]
        command = self._ranks.broadcast(decide(reports) if self._ranks.rank == 0 else None)
        mine = [message.value for _, sent in everything for message in sent if message.to == self._ranks.rank]
        return Received(commands=[] if command is None else [command], messages=mine)


class Alone(Ranks):
    """One process: whatever is gathered is its own."""

    rank = 0
    size = 1

    def gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        return value

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nobody has anything to add."""

    def channel(self, *, lockstep: bool) -> Channel:
        return LockstepChannel(self)
