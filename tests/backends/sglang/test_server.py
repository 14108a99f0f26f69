"""A server process of our own: its start, its death, its end. SGLang's place is taken by the package below path/."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rhymerl.backends.remote.process import Server
from rhymerl.backends.sglang.own import start_server
from rhymerl.errors import BackendError

HOME = Path(__file__).parents[3]
PATH = Path(__file__).parent / "path"
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(map(str, (PATH, HOME)))}


@pytest.fixture
def start(tmp_path):
    """Starts servers, and ends them."""
    servers = []

    def start(*arguments, **environment):
        servers.append(start_server(list(arguments), {**ENVIRONMENT, **environment}, tmp_path / "engine.log"))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def child_of(server: Server) -> int:
    """The process that the server has started."""
    return int(re.search(r"child (\d+)", server.log.read_text())[1])


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 100
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


@pytest.mark.parametrize("fault", ["", "clings"])
def test_a_server_starts_and_leaves_no_process_behind(start, fault, monkeypatch):
    monkeypatch.setattr("rhymerl.backends.remote.process._GRACE_S", 0.5)
    server = start("--mem-fraction-static", "0.5", FAKE_FAULT=fault)
    server.wait_until_ready(60)
    assert server.is_alive
    server.check()
    assert not server.dies_within(0)
    assert server.client.get("/health") == ""
    log = server.log.read_text()
    assert log.startswith("plugins loaded\n"), "the algorithm's name has to be known before the arguments are read"
    assert re.search(r"arguments: --nccl-port \d+ --mem-fraction-static 0.5\n", log)
    child = child_of(server)
    assert is_running(child)
    server.close()
    server.close()
    assert not server.is_alive
    assert gone(child)


def test_a_server_that_dies_while_it_starts_is_told_with_the_end_of_its_log(start):
    server = start(FAKE_FAULT="dies")
    with pytest.raises(BackendError, match=r"(?s)has died \(exit code 3\); the end of its log .*no memory left"):
        server.wait_until_ready(60)


def test_a_server_that_does_not_get_ready_is_given_up(start):
    server = start(FAKE_FAULT="hangs")
    deadline = time.monotonic() + 300
    while "child" not in server.last_words() and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(
        BackendError, match=r"(?s)backend\.start_timeout_s=0\.5: the SGLang engine did not get ready;.*child"
    ):
        server.wait_until_ready(0.5)


def test_a_server_that_is_killed_is_told_by_the_signal(start):
    server = start()
    server.wait_until_ready(60)
    child = child_of(server)
    os.kill(server._process.pid, signal.SIGKILL)
    assert server.dies_within(5)
    with pytest.raises(BackendError, match=r"killed by SIGKILL"):
        server.check()
    server.close()
    assert gone(child)


def test_only_the_end_of_a_long_log_is_told(start):
    server = start(FAKE_FAULT="dies")
    server.log.write_text("\n".join(f"line {i}" for i in range(100)) + "\n")
    assert server.dies_within(30)
    words = server.last_words()
    assert "line 99" in words
    assert "line 10\n" not in words


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(None, marks=pytest.mark.slow)], ids=["killed", "ended"])
def test_a_server_ends_with_its_trainer(tmp_path, how):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from rhymerl.backends.sglang.own import start_server\n"
        "server = start_server([], {'PYTHONPATH': sys.argv[1]}, Path(sys.argv[2]))\n"
        "server.wait_until_ready(60)\n"
        "print(server._process.pid, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    log = tmp_path / "engine.log"
    words = [sys.executable, "-c", code, ENVIRONMENT["PYTHONPATH"], str(log)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=HOME) as trainer:
        leader = int(trainer.stdout.readline())
        child = int(re.search(r"child (\d+)", log.read_text())[1])
        assert is_running(leader)
        assert is_running(child)
        if how is not None:
            trainer.send_signal(how)
    assert gone(leader)
    assert gone(child)
