"""The interface of backends whose engines may be servers that run already."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from rhymerl.backends.base import RolloutBackend

HISTORY_TOKENS = 50_000_000  # of past answers that a worker remembers at most, unless it is told otherwise


class ServedBackend(RolloutBackend):
    """An engine of one's own, or servers that run already: each of these is a worker by itself, and no rank's."""

    history_tokens: int | None = HISTORY_TOKENS  # that each of them remembers at most

    @property
    @abstractmethod
    def has_servers(self) -> bool:
        """Return whether its engines run already."""

    @abstractmethod
    def servers(self) -> Sequence[ServedBackend]:
        """Return a backend for each server that there is. Raises BackendError for one that does not answer."""
