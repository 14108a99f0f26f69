"""Signals that end a run: the first after the current training step, with its state saved; the second at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_OUTPUTS = (1, 2)


class Interrupt:
    """A context manager that owns SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 in the main thread, and gives them back.

    Unless something `hold`s it, each is a KeyboardInterrupt. What is ignored (as by nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self.was_raised = False  # as a KeyboardInterrupt, which some libraries swallow while they are imported
        self.signal = signal.SIGINT  # the one that was sent
        self._held = False
        self._previous: dict[signal.Signals, Any] = {}
        self._terminals: list[int] = []
        self._pid = 0  # of the process that this is about

    @property
    def exit_code(self) -> int:
        """Return the exit code that a shell expects of a program that a signal has ended."""
        return 128 + self.signal

    def hold(self) -> None:
        """Let the first signal from now on only set `requested`; the holder looks at it between two steps."""
        self._held = True
        self._take()  # again: Lightning takes SIGTERM when a fit begins

    def release(self) -> None:
        """Let a signal end the program at once: nothing would be lost any more."""
        self._held = False

    def __enter__(self) -> Self:
        self._pid = os.getpid()
        self._terminals = [each for each in _OUTPUTS if os.isatty(each)]
        if threading.current_thread() is threading.main_thread():
            known = {each: signal.getsignal(each) for each in _SIGNALS}
            self._previous = {each: before for each, before in known.items() if before != signal.SIG_IGN}
        self._take()
        return self

    def _take(self) -> None:
        for number in self._previous:
            signal.signal(number, self._on_signal)

    def __exit__(self, *of_an_error: object) -> None:
        for number, before in self._previous.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)  # None: it was not Python's

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._as_usual(number)
        again, self.requested = self.requested, True
        self.signal = signal.Signals(number)
        if number == signal.SIGHUP:
            self._leave_terminal()
        if again or not self._held:
            self.was_raised = True
            raise KeyboardInterrupt
        words = "Ctrl-C again stops at once" if number == signal.SIGINT else f"{self.signal.name} again stops at once"
        print(f"\nStopping after this step; {words}.", file=sys.stderr)

    def _as_usual(self, number: int) -> None:
        """Handle a signal as usual in a forked child, which its parent must be able to end."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _leave_terminal(self) -> None:
        """Redirect output from a terminal that is gone, lest writing to it fails the step."""
        for output in self._terminals:
            if not os.isatty(output):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, output)
                os.close(nowhere)
