"""Right answers still count as right where processes are few, or as nothing: never as wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rhymerl.rewards.sandbox.run import missing_walls

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or bool(missing_walls()), reason="this machine offers its sandbox not all walls"
)
SCENES = Path(__file__).parent / "crowded.py"
ROOT = Path("/sys/fs/cgroup")


@pytest.fixture
def crowded() -> Iterator[Callable[[str, int], dict[str, Any]]]:
    """Return what a scene of crowded.py prints in a control group with so many processes."""
    group = new_group()

    def run(scene: str, num_processes: int) -> dict[str, Any]:
        (group / "pids.max").write_text(str(num_processes))
        enter = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group)]
        done = subprocess.run(
            [*enter, sys.executable, str(SCENES), scene], capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    yield run
    group.rmdir()


def new_group() -> Path:
    """Make a group within that of this process or beside it, as the version of cgroup wants it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):
            continue
        own = (ROOT / "pids" if controllers == "pids" else ROOT) / path.lstrip("/")
        for parent in (own, own.parent):
            group = parent / f"rhymerl-test-{os.getpid()}"
            with suppress(OSError):
                group.mkdir()
                if (group / "pids.max").exists():
                    return group
                group.rmdir()
    pytest.skip("no control group can be made here")


def test_a_bomb_of_threads_takes_nothing_from_other_answers(crowded) -> None:
    found = crowded("beside_bombs", 200)
    assert found["right"] == [1.0] * 20
    assert found["bombs"] == [0.0] * 4
    assert found["failures"] == 0


def test_a_want_of_processes_that_passes_costs_nothing(crowded) -> None:
    assert crowded("for_a_while", 40)["passed"] == 1


@pytest.mark.parametrize("scene", ["no_sandbox", "no_thread", pytest.param("no_answer", marks=pytest.mark.slow)])
def test_a_want_of_processes_that_lasts_is_not_the_answers_fault(crowded, scene: str) -> None:
    found = crowded(scene, 40)
    assert "passed" not in found
    assert found["error"]


def test_reward_processes_start_when_there_is_room_for_them(crowded) -> None:
    assert crowded("start_of_processes", 40)["right"] == [1.0, 2.0, 3.0]
