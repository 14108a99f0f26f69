"""The report of runs that go on: served on this machine alone, and made anew when they have written more.

A response has the header `Refresh`, by which the browser loads the page again, at the same place and without a script;
but not where all runs have ended, nor for a page that is held (`/?hold`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from rhymerl.errors import ConfigError, RhymeError
from rhymerl.folders import is_in_use
from rhymerl.progress import counted
from rhymerl.report.base import Live, Run
from rhymerl.report.page import distinct, page_of, with_distinct_names
from rhymerl.report.reading import read_run
from rhymerl.report.steps import STEPS

_LOOPBACK = "127.0.0.1"
_REFRESH_S = 10.0
_REST = 20  # times as long as it takes to make a page, so that watching costs a twentieth of a core
_READ = ("config.yaml", "summary.json", "history.rhyme", STEPS, "tensorboard/*")


class WatchedRuns:
    """The page about the runs in these directories, as they are when it is asked for.

    A run may not have begun its first step. What cannot be read later on is said in the page. Raises what `read_run`
    raises for a directory that is none of a run, or that cannot be read at first.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = distinct(paths)
        self._lock = Lock()
        self._rest_s = 0.0
        self._state = self._current_state()
        self._page = self._page_of([_read(path) for path in self.paths])

    def page(self) -> tuple[str, float | None]:
        """Return the page, and after how many seconds to load it again; None where all runs have ended."""
        with self._lock:
            if (state := self._current_state()) != self._state:
                self._state = state
                self._page = self._page_of([_read_or_say(path) for path in self.paths])
            return self._page, max(_REFRESH_S, self._rest_s) if self._any_goes_on else None

    @property
    def _any_goes_on(self) -> bool:
        return any(is_going_on for is_going_on, *_ in self._state)

    def _current_state(self) -> list[Any]:
        """Return what is another when a run begins, writes or ends."""
        return [(is_in_use(path), *_files(path)) for path in self.paths]

    def _page_of(self, runs: Sequence[Run]) -> str:
        began = time.monotonic()
        named = with_distinct_names(runs)
        states = [_sentence(run, is_going_on) for run, (is_going_on, *_) in zip(named, self._state, strict=True)]
        live = Live(states=states, read_at=time.strftime("%H:%M:%S"), goes_on=self._any_goes_on)
        page = page_of(named, live=live)
        self._rest_s = _REST * (time.monotonic() - began)
        return page


def _files(path: Path) -> Iterator[tuple[str, int, int]]:
    for file in [each for name in _READ for each in sorted(path.glob(name))]:
        with suppress(FileNotFoundError):
            found = file.stat()
            yield file.name, found.st_size, found.st_mtime_ns


def _read(path: Path) -> Run:
    has_begun = (path / "config.yaml").exists() or not is_in_use(path)
    return read_run(path) if has_begun else Run(path=path, name=path.resolve().name)


def _read_or_say(path: Path) -> Run:
    try:
        return _read(path)
    except RhymeError as error:
        return Run(path=path, name=path.resolve().name, missing=[str(error)])


def _sentence(run: Run, is_going_on: bool) -> str:
    done = max(map(max, run.curves.values()), default=0)
    steps = counted(done, run.step_name)
    if not is_going_on:
        return f"{run.name} has ended, after {steps}."
    return f"{run.name} goes on, after {steps}." if done else f"{run.name} has not ended its first step."


class WatchServer(ThreadingHTTPServer):
    """Serves the page at `url`, to this machine alone. `port` 0 is any free one. Raises as WatchedRuns does."""

    def __init__(self, paths: Sequence[str | Path], *, port: int = 0) -> None:
        self.runs = WatchedRuns(paths)
        try:
            super().__init__((_LOOPBACK, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"port={port}: nothing can be served there ({error}); leave it out for a free one"
            ) from error
        self.url = f"http://{_LOOPBACK}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = 10.0  # for a connection over which a browser asks nothing

    def do_GET(self) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in (_LOOPBACK, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)  # a page from elsewhere, under a name that leads here
        elif self.path not in ("/", "/?hold"):
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            page, refresh_s = self.server.runs.page()
            self._send(page, refresh_s if self.path == "/" else None)

    def _send(self, page: str, refresh_s: float | None) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        if refresh_s is not None:
            self.send_header("Refresh", f"{refresh_s:.0f}")
        self.end_headers()
        with suppress(ConnectionError):  # the reader has left
            self.wfile.write(page.encode(errors="backslashreplace"))

    def log_message(self, *words: object) -> None:
        """Say nothing about each request."""
