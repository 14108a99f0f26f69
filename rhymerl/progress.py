"""The progress of a long command: one line, rewritten, on a terminal; elsewhere a plain line now and then."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_REDRAW_S = 0.2
_LINE_S = 30.0
# Before so much is done a guess at the time left is worth nothing: the first answers are the shortest, and engines
# start slowly.
_KNOWN_AFTER_S = 2.0
_KNOWN_AFTER_PARTS = 8
_KNOWN_AFTER_SHARE = 0.05


class ProgressBar:
    """A progress bar that shows nothing: the default of everything that may take long."""

    def begin(self, words: str, total: int = 0) -> None:
        """Say that `words` are what goes on from now on, in `total` parts; 0 when nobody knows."""

    def advance(self, number: int = 1) -> None:
        """Count further parts as done; do nothing without a `begin`."""

    def note(self, words: Callable[[], str]) -> None:
        """Show what this returns behind the count, until the next `begin`; it is asked whenever the line is written."""

    def end(self) -> None:
        """End the progress, which leaves nothing on a terminal."""

    @contextmanager
    def during(self, words: str, total: int = 0) -> Iterator[None]:
        """Context between `begin` and `end`."""
        self.begin(words, total)
        try:
            yield
        finally:
            self.end()


SILENT = ProgressBar()


class ShownProgressBar(ProgressBar):
    """Shows progress on a stream, stderr by default. Other code has to end it before it prints."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.is_terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self._clock = clock
        self._words, self._note = "", _nothing
        self._total = self._done = 0
        self._first = (0, 0.0)  # parts and time, when the first ones were done
        self._next = 0.0

    def begin(self, words: str, total: int = 0) -> None:
        self._words, self._note, self._total, self._done = words, _nothing, total, 0
        self._next = now = self._clock()
        if self.is_terminal:
            self._show(now)
        else:
            self._next += _LINE_S

    def advance(self, number: int = 1) -> None:
        now = self._clock()
        if not self._done:
            self._first = (number, now)
        self._done += number
        if self._words and now >= self._next:
            self._show(now)

    def note(self, words: Callable[[], str]) -> None:
        self._note = words

    def end(self) -> None:
        if self._words and self.is_terminal:
            self._write("\r\x1b[K")
        self._words = ""

    def _show(self, now: float) -> None:
        text = self._text(now)
        if self.is_terminal:
            self._write(f"\r{text[: _columns(self.stream) - 1]}\x1b[K")
        else:
            self._write(f"{text}\n")
        self._next = now + (_REDRAW_S if self.is_terminal else _LINE_S)

    def _text(self, now: float) -> str:
        if not self._total:
            return f"{self._words}: {self._done:,}" if self._done else f"{self._words} ..."
        text = f"{self._words}: {self._done:,} of {self._total:,}{self._note()}"
        done, seconds = self._done - self._first[0], now - self._first[1]
        known_after = max(min(_KNOWN_AFTER_PARTS, self._total // 2), _KNOWN_AFTER_SHARE * self._total)
        if not done or self._done < known_after or self._done >= self._total or seconds < _KNOWN_AFTER_S:
            return text
        return f"{text}, {rate(done / seconds)}, {about(seconds * (self._total - self._done) / done)} left"

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def _nothing() -> str:
    return ""


def rate(per_second: float) -> str:
    """Return a rate as people say it: `1,200 a second`, `2.5 a second`, `12 a minute`, `0.5 a minute`."""
    number, unit = (per_second, "second") if per_second >= 1 else (60 * per_second, "minute")
    return f"{number:,.0f} a {unit}" if number >= 10 else f"{number:.1f} a {unit}"


def about(seconds: float) -> str:
    """Return a duration as people say it: `about 40 s`, `about 12 min`, `about 3 h 20 min`."""
    if seconds < 90:
        return f"about {max(1, round(seconds)):.0f} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {minutes // 60} h {minutes % 60} min"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 seed`, `1,024 seeds`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # it has no descriptor, or no size
        return 80
