"""`rhymerl fit` on two ranks of one machine: it listens there only, and no rank outlives rank 0, however that ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

RANKS = ["trainer.devices=2", "trainer.strategy=ddp", "trainer.accelerator=cpu"]
SOON_S = 200.0


class Launch:
    """`rhymerl` as from a shell; Lightning's launcher in it starts rank 1."""

    def __init__(self, words: list[str], output: Path, **variables: str) -> None:
        self.output = output
        self._mark = f"MARK={output}"
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rhymerl", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "OMP_NUM_THREADS": "1", "MARK": str(output), **variables},
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.output.read_text()

    def processes(self, *marks: str) -> list[int]:
        """Return the processes that run with these variables, whoever has started them."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                if {self._mark, *marks} <= set(variables):
                    found.append(int(folder.name))
        return found

    def rank_1(self) -> int:
        """Its process, as soon as it is there."""
        return until(lambda: next(iter(self.processes("LOCAL_RANK=1")), 0), self)

    def leaves_nothing(self) -> bool:
        """Return whether nothing is left within SOON_S."""
        deadline = time.monotonic() + SOON_S
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.processes()

    def close(self) -> None:
        for process in self.processes():
            os.kill(process, signal.SIGKILL)
        self.process.wait()


def until(found: Callable[[], int], launch: Launch) -> int:
    deadline = time.monotonic() + 600
    while not (value := found()):
        assert time.monotonic() < deadline, launch.said
        time.sleep(0.05)
    return value


@pytest.fixture
def launch(settings: list[str], tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    started: list[Launch] = []

    def start(*more: str, **variables: str) -> Launch:
        words = [*settings, *RANKS, f"run_dir={tmp_path / 'run'}", "trainer.max_steps=1000", *more]
        started.append(Launch(words, tmp_path / "output", **variables))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.slow
def test_they_listen_to_this_machine_only_and_a_stopped_one_does_not_stay_behind(launch, tmp_path):
    run = launch("checkpoint.every_n_steps=1")
    other = run.rank_1()
    until(lambda: any((tmp_path / "run").glob("checkpoints/*.ckpt")), run)
    found = [address for process in (run.process.pid, other) for address in listening(process)]
    assert found
    assert all(address.startswith("127.") or address == "::1" for address in found), found
    os.kill(other, signal.SIGSTOP)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    assert run.leaves_nothing()
    assert "rank 0 has ended (killed?)" in run.said


@pytest.mark.parametrize("is_stopped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_nor_when_that_happens_before_they_have_met(is_stopped, launch):
    run = launch()
    other = run.rank_1()
    if is_stopped:
        time.sleep(1.0)  # it has begun
        os.kill(other, signal.SIGSTOP)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    assert run.leaves_nothing()


@pytest.mark.slow
def test_nor_when_the_port_is_taken_at_which_they_would_meet(launch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = launch(MASTER_PORT=str(port))
        assert run.process.wait(600) == 1
        assert run.leaves_nothing()
    assert f"error: MASTER_PORT={port}: the ranks cannot meet there" in run.said


def listening(process: int) -> list[str]:
    """Addresses at which a process accepts connections."""
    sockets = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(link))
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                words = bytes.fromhex(local.partition(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append(socket.inet_ntop(family, packed))
    return found
