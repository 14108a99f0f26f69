"""A server process of our own: its start, its death, its end."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rhymerl.backends.sglang.client import Client
from rhymerl.errors import BackendError, ConfigError

_TAIL_LINES = 30
_POLL_S = 0.25
_GRACE_S = 5.0


def require_sglang() -> None:
    """Raise ConfigError when SGLang is not installed."""
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError("backend=sglang: sglang is not installed; pip install 'rhymerl[sglang]'")


class Server:
    """Starts when it is made; `close` leaves no process behind. A context manager would end it too early: the backend owns it."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.port = free_port()
        self.client = Client("127.0.0.1", self.port)
        words = [sys.executable, "-m", "rhymerl.backends.sglang.serve", "--host", "127.0.0.1", "--port", str(self.port)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*words, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return when it answers. Raises BackendError with the end of its log when it dies or takes longer."""
        deadline = time.monotonic() + timeout_s
        while not self.client.is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise BackendError(
                    f"backend.start_timeout_s={timeout_s:g}: the SGLang engine did not get ready; {self.last_words()}"
                )
            time.sleep(_POLL_S)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def dies_within(self, timeout_s: float) -> bool:
        """Whether it is dead, or so before the time is over: a process that is killed closes its connections before it is gone."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.is_alive

    def check(self) -> None:
        """Raise BackendError with the end of its log when it has died."""
        if not self.is_alive:
            code = self._process.returncode
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise BackendError(f"the SGLang engine has died ({how}); {self.last_words()}")

    def last_words(self) -> str:
        """The end of its log, to follow a semicolon."""
        lines = self.log.read_text(errors="replace").splitlines()
        return f"the end of its log {self.log}:\n" + "\n".join(lines[-_TAIL_LINES:])

    def close(self) -> None:
        """End all of its processes; may be called twice."""
        for sign, grace_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
            try:
                os.killpg(self._process.pid, sign)
            except ProcessLookupError:  # nobody is left in the group
                break
            self._wait_for_group(grace_s)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def _wait_for_group(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._process.poll()  # reaps the leader, which would count as alive
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


def free_port() -> int:
    """One that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
