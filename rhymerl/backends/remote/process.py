"""A server process of our own: its start, its death, its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rhymerl.backends.remote.client import Client, NoAnswerError
from rhymerl.errors import BackendError

_TAIL_LINES = 30
_POLL_S = 0.25
_GRACE_S = 5.0
# What a launcher says of one rank of the trainer: an engine would take itself for that rank.
_OF_A_RANK = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("RHYMERL_SECRET", "RHYMERL_LAUNCHER", "GLOO_SOCKET_IFNAME"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
}


class Server:
    """A server process that starts when it is made; `close` leaves no process behind.

    It is no context manager, which would end it too early: the backend owns it. `command` makes the words to run from
    the port to listen at and a second one, which is free for a process group. The process is to end when its standard
    input closes, as it does when the trainer dies.
    """

    def __init__(self, command: Callable[[int, int], Sequence[str]], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._held = [held_port(), held_port()]  # until it listens there: other engines start at the same time
        self.port, group_port = (int(held.getsockname()[1]) for held in self._held)
        self.client = Client("127.0.0.1", self.port)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command(self.port, group_port),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**_without_rank(os.environ), **environment},
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
        self._let_ports_go()

    def _let_ports_go(self) -> None:
        for held in self._held:
            held.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def dies_within(self, timeout_s: float) -> bool:
        """Return whether it dies within the time: a killed process closes its connections before it is gone."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.is_alive

    def check(self) -> None:
        """Raise NoAnswerError with the end of its log when it has died."""
        if not self.is_alive:
            code = self._process.returncode
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise NoAnswerError(f"the SGLang engine has died ({how}); {self.last_words()}")

    def last_words(self) -> str:
        """Return the end of its log, to follow a semicolon."""
        lines = self.log.read_text(errors="replace").splitlines()
        return f"the end of its log {self.log}:\n" + "\n".join(lines[-_TAIL_LINES:])

    def close(self) -> None:
        """End all of its processes; may be called twice."""
        self._let_ports_go()
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


def held_port() -> socket.socket:
    """Return a bound socket whose port is handed to nobody else; a server may still ask for that port and listen."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _without_rank(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if name not in _OF_A_RANK and not name.startswith("TORCHELASTIC_")
    }
