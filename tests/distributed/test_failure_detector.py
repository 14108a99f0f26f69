"""Three real processes on one failure_detector, which the test kills, stops, closes and lets hang."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rhymerl.distributed import failure_detector as module
from rhymerl.distributed.failure_detector import FailureDetector
from rhymerl.errors import RunError
from tests.integration.programs import CONTEXT

SIZE = 3
GRACE_S = 1.0
HANGS_S = 100.0
NEVER_S = 1e5  # what is not noticed at once would be noticed only then


def obey(rank: int, pipe: Connection[Any, Any], output: Path | None) -> None:
    """A rank that checks its failure_detector while it waits for commands; its errors go to the file `output`."""
    if output is not None:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)

    def exchange(value: object) -> object:
        if rank:
            return pipe.recv()
        pipe.send(value)
        return value

    module._OPEN_TIMEOUT_S = NEVER_S
    failure_detector = FailureDetector(rank, SIZE, exchange=exchange, host="127.0.0.1", grace_s=GRACE_S)
    pipe.send("open")
    commands = {
        "close": failure_detector.close,
        "fail": lambda: failure_detector.fail("ValueError: too bad"),
        "fork": lambda: pipe.send(fork()),
        "hang": lambda: (pipe.send("hangs"), ctypes.CDLL(None).sleep(60)),
        "leave": lambda: None,
        "wait": lambda: failure_detector.check(wait_s=NEVER_S),
    }
    try:
        command = ""
        while command not in ("close", "fail", "leave"):
            failure_detector.check()
            if pipe.poll(0.01):
                command = pipe.recv()
                commands[command]()
    except RunError as error:
        pipe.send(str(error))
        failure_detector.close()


def fork() -> int:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


class Team:
    """The processes, and the pipes over which they get commands and report."""

    def __init__(self, output: Path | None = None) -> None:
        self.pipes, theirs = zip(*(CONTEXT.Pipe() for _ in range(SIZE)), strict=True)
        self.processes = [CONTEXT.Process(target=obey, args=(rank, theirs[rank], output)) for rank in range(SIZE)]
        for process, pipe in zip(self.processes, theirs, strict=True):
            process.start()
            pipe.close()

    def open(self) -> None:
        self.pass_on(self.pipes[0].recv())

    def pass_on(self, value: object) -> None:
        for pipe in self.pipes[1:]:
            pipe.send(value)
        assert [pipe.recv() for pipe in self.pipes] == ["open"] * SIZE

    def command(self, rank: int, command: str) -> None:
        self.pipes[rank].send(command)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    def exit_code(self, rank: int) -> int | None:
        self.processes[rank].join(HANGS_S)
        return self.processes[rank].exitcode

    def reports(self, rank: int, failure: str) -> bool:
        """Return whether the rank reports that `failure`, and ends well."""
        assert self.pipes[rank].poll(HANGS_S), f"rank {rank} sees no failure"
        return (self.pipes[rank].recv(), self.exit_code(rank)) == (failure, 0)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()


@pytest.fixture
def starting() -> Iterator[Team]:
    with closing(Team()) as team:
        yield team


@pytest.fixture
def team(starting: Team) -> Team:
    starting.open()
    return starting


@pytest.mark.parametrize("victim", range(SIZE))
def test_killed_rank_is_named(team: Team, victim: int) -> None:
    team.signal(victim, signal.SIGKILL)
    assert all(team.reports(rank, f"rank {victim} has ended (killed?)") for rank in range(SIZE) if rank != victim)


@pytest.mark.parametrize("leaver", [0, 2])
def test_rank_that_leaves_without_a_word_has_failed(team: Team, leaver: int) -> None:
    team.command(leaver, "leave")
    assert all(team.reports(rank, f"rank {leaver} has ended (killed?)") for rank in range(SIZE) if rank != leaver)


@pytest.mark.parametrize("failing", [0, 1])
def test_reason_of_a_failure_arrives_everywhere(team: Team, failing: int) -> None:
    team.command(2, "wait")
    team.command(failing, "fail")
    assert all(team.reports(rank, f"rank {failing} failed: ValueError: too bad") for rank in {1 - failing, 2})
    assert team.exit_code(failing) == 0


@pytest.mark.parametrize("hanging", [0, 2])
def test_rank_that_hangs_after_a_failure_is_ended(hanging: int, tmp_path: Path) -> None:
    with closing(Team(tmp_path / "output")) as team:
        team.open()
        team.command(hanging, "hang")
        assert team.pipes[hanging].recv() == "hangs"  # else it might see the failure before it gets the command
        team.signal(1, signal.SIGKILL)
        assert team.reports(2 - hanging, "rank 1 has ended (killed?)")
        assert team.exit_code(hanging) == 1
    hung = f"error: rank 1 has ended (killed?)\nerror: rank {hanging} hung for 1 s after that and ends too\n"
    assert (tmp_path / "output").read_text() == hung


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_ranks_that_close_in_any_order_part_in_peace(team: Team, order: tuple[int, ...]) -> None:
    for rank in order:
        team.command(rank, "close")
        assert team.exit_code(rank) == 0
        time.sleep(0.05)
    for pipe in team.pipes:
        with pytest.raises(EOFError):  # no report
            pipe.recv()


def test_strangers_change_nothing(starting: Team) -> None:
    port, token = starting.pipes[0].recv()
    says = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0",
        b"\xff" * 10_000,
        f"{token} 0\0".encode(),
        f"{token[:-1]}! 1\0".encode(),
    ]
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in says]
    for stranger, words in zip(strangers, says, strict=True):
        stranger.sendall(words)
    socket.create_connection(("127.0.0.1", port)).close()
    starting.pass_on((port, token))
    for stranger in strangers:
        stranger.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    starting.signal(2, signal.SIGKILL)
    assert all(starting.reports(rank, "rank 2 has ended (killed?)") for rank in range(2))


@pytest.mark.parametrize("stopped", [0, 1])
def test_stopped_rank_is_no_failure_and_nobody_waits_for_it(team: Team, stopped: int) -> None:
    team.signal(stopped, signal.SIGSTOP)
    time.sleep(2.0)
    assert not any(pipe.poll() for pipe in team.pipes)
    team.command(2, "close")
    assert team.exit_code(2) == 0
    team.signal(stopped, signal.SIGCONT)
    for rank in range(2):
        team.command(rank, "close")
        assert team.exit_code(rank) == 0


@pytest.mark.parametrize("victim", [0, 1])
def test_forked_child_does_not_keep_its_parent_alive(team: Team, victim: int) -> None:
    team.command(victim, "fork")
    child = team.pipes[victim].recv()
    team.signal(victim, signal.SIGKILL)
    try:
        assert team.reports(2, f"rank {victim} has ended (killed?)")
    finally:
        os.kill(child, signal.SIGKILL)


def test_rank_that_does_not_arrive_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OPEN_TIMEOUT_S", 0.3)
    opened: list[FailureDetector] = []

    def exchange(value: object) -> object:
        second = Thread(
            target=lambda: opened.append(FailureDetector(1, SIZE, exchange=lambda _: value, host="127.0.0.1"))
        )
        second.start()
        second.join()
        return value

    missing = "^rank 2 has not connected within 0.3 s$"
    with pytest.raises(RunError, match=missing):
        FailureDetector(0, SIZE, exchange=exchange, host="")
    with closing(opened[0]), pytest.raises(RunError, match=missing):
        opened[0].check(wait_s=HANGS_S)


def test_failure_that_comes_with_the_hello_is_seen_and_a_stranger_is_dropped() -> None:
    strangers: list[socket.socket] = []

    def exchange(value: Any) -> object:
        strangers.append(socket.create_connection(("127.0.0.1", value[0])))
        FailureDetector(1, 2, exchange=lambda _: value, host="127.0.0.1").fail("too early")
        return value

    failure_detector = FailureDetector(0, 2, exchange=exchange, host="")
    with strangers[0] as stranger:
        assert stranger.recv(1) == b""
    with closing(failure_detector), pytest.raises(RunError, match="^rank 1 failed: too early$"):
        failure_detector.check(wait_s=HANGS_S)


def test_rank_0_that_cannot_be_reached_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RunError, match=f"^rank 1 cannot connect to rank 0 at 127.0.0.1:{port}: "):
        FailureDetector(1, 2, exchange=lambda _: (port, "token"), host="127.0.0.1")


def test_one_rank_needs_no_connection() -> None:
    failure_detector = FailureDetector(0, 1, exchange=lambda value: value, host="")
    failure_detector.check()
    failure_detector.close()
    failure_detector.close()
    failure_detector.check()
