"""Ctrl-C: while training, the first one ends the run after its current step, with its state saved; the second at once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupt:
    """A context manager that owns SIGINT in the main thread, and gives it back.

    Unless something `hold`s it, Ctrl-C is a KeyboardInterrupt as usual.
    """

    def __init__(self) -> None:
        self.requested = False
        self._held = False
        self._previous: Any = None

    def hold(self) -> None:
        """From now on the first Ctrl-C only sets `requested`; the holder looks at it between two steps."""
        self._held = True

    def release(self) -> None:
        """Nothing would be lost any more: Ctrl-C ends the program at once."""
        self._held = False

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
        if again or not self._held:
            raise KeyboardInterrupt
        print("\nStopping after this step; Ctrl-C again stops at once.", file=sys.stderr)
