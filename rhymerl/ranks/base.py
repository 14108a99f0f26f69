"""What a process knows of the others that train with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


class Ranks(ABC):
    """This process is `rank` of `size`. Every method is a meeting: all ranks call it, in the same order.

    A rank that ends while others wait for it makes them raise RunError, which says which one and why.
    """

    rank: int
    size: int

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank. A value travels as a pickle, and not through a GPU."""

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """Rank 0's value on every rank; what the others give is not looked at."""

    @abstractmethod
    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up each parameter's gradient over the ranks, in place; a missing one counts as zeros."""

    def check(self) -> None:
        """Raise RunError when a rank has ended. No meeting: called wherever a rank waits or works for long."""

    def close(self) -> None:
        """The ranks part, in peace; may be called twice. No meeting."""


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
