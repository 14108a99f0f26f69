"""Ctrl-C: the first one ends the run after its current step, with its state saved; the second one ends it at once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Protocol, Self


class Stoppable(Protocol):
    """A Lightning Trainer, as far as it matters here."""

    should_stop: bool


class Interrupt:
    """A context manager that holds SIGINT in the main thread, and gives it back.

    Before a trainer is attached, Ctrl-C is a KeyboardInterrupt as usual.
    """

    def __init__(self) -> None:
        self.requested = False
        self._trainer: Stoppable | None = None
        self._previous: Any = None

    def attach(self, trainer: Stoppable) -> None:
        """From now on this trainer is asked to stop first."""
        self._trainer = trainer

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if again or self._trainer is None:
            raise KeyboardInterrupt
        self._trainer.should_stop = True
        print("\nStopping after this step; Ctrl-C again stops at once.", file=sys.stderr)
