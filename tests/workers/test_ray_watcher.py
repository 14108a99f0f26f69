"""Leftovers of a cluster whose trainer is killed, without Ray: its folder, and processes that write into it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rhymerl.workers.remote.ray_watcher import Watcher

# As Ray's agents: of the cluster by their files alone, since they have given themselves another command line.
TRAINER = """
import subprocess, sys
from rhymerl.workers.remote.ray_watcher import Watcher
watcher = Watcher(sys.argv[1])
with open(sys.argv[1] + "/agent.log", "w") as log:
    agent = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=log)
other = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(agent.pid, other.pid, flush=True)
sys.stdin.read()
"""


def lives(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_trainer_that_is_killed_leaves_no_process_of_the_cluster_and_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "ray-cluster"
    folder.mkdir()
    started = [sys.executable, "-c", TRAINER, str(folder)]
    with subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        agent, other = map(int, trainer.stdout.readline().split())
        assert lives(agent)
        trainer.kill()
    try:
        wait_until(lambda: not lives(agent) and not folder.exists())
        assert lives(other), "it is none of the cluster's"
    finally:
        os.kill(other, signal.SIGKILL)


def test_a_trainer_that_is_dying_is_still_the_parent_of_what_it_has_started(tmp_path: Path) -> None:
    """Its files are closed first: so the watcher may be faster than the kernel, which then gives its children away."""
    folder = tmp_path / "ray-cluster"
    folder.mkdir()
    watcher = Watcher(str(folder))
    with (folder / "agent.log").open("w") as log:
        agent = subprocess.Popen(["sleep", "600"], stdout=log, env={})
    try:
        assert watcher._process.stdin is not None
        watcher._process.stdin.close()
        assert agent.wait(60) == -signal.SIGKILL
        wait_until(lambda: not folder.exists())
    finally:
        agent.kill()
        agent.wait()
        watcher._process.wait()


def test_one_that_ends_by_itself_waits_for_it_and_is_left_alone(tmp_path: Path) -> None:
    """Ray's driver, which is the trainer, writes into the folder, too."""
    folder = tmp_path / "ray-cluster"
    folder.mkdir()
    watcher = Watcher(str(folder))
    with (folder / "driver.log").open("w"), (folder / "agent.log").open("w") as log:
        words = ["sh", "-c", "sleep 600 2> /dev/null & echo $! >&2"]  # whose parent ends
        agent = int(subprocess.run(words, stdout=log, stderr=subprocess.PIPE, text=True, check=True).stderr)
        own = subprocess.Popen(["sleep", "600"], stdout=log)
        watcher.close()
        assert not lives(agent)
        assert own.poll() is None
        own.kill()
        own.wait()
    assert not folder.exists()
