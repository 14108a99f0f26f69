"""Actors and trainers that are killed, and actors that are stopped: time is lost, and nothing else."""

from __future__ import annotations

import random
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rhymerl.report.steps import STEPS, read_steps
from tests.ray.commands import actors, answers, end, finish, furthest, one_process, processes, start, temporary, weights

pytestmark = pytest.mark.ray
SLOW = ["trainer.max_steps=10", "rollout.max_tokens=96", "backend.hang_timeout_s=3", "backend.start_timeout_s=120"]
LASTING = [
    "backend.engine._target_=benchmarks.emulation.EmulatedBackend",
    "backend.engine.emulate=benchmarks/emulated/h100_8b.json",
    "backend.engine.emulate_scale=20",
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    one_process(run_dir, *SLOW[:2])
    yield run_dir
    shutil.rmtree(temporary(run_dir.parent))


def wait_for_actors(run_dir: Path, process: subprocess.Popen[str], number: int) -> list[int]:
    while process.poll() is None and len(found := actors(run_dir)) < number:
        time.sleep(0.05)
    return [] if process.poll() is not None else found


def check(run_dir: Path, alone: Path, run_ahead: str) -> None:
    if run_ahead == "keep":
        assert len({answer[:3] for answer in answers(run_dir)}) == len(answers(run_dir)) == 10 * 16
    else:
        assert answers(run_dir) == answers(alone)
        assert furthest(weights(run_dir), weights(alone)) < 1e-9


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("run_ahead", ["'off'", "draft", "keep"])
def test_actors_that_are_lost_cost_no_token(run_ahead, sign, alone, tmp_path):
    draw = random.Random(f"{run_ahead}/{sign}")
    process = start(tmp_path / "run", *SLOW, *LASTING, f"run_ahead={run_ahead}", "workers=3")
    wanted, kills = 8 if sign == signal.SIGKILL else 4, list[float]()
    while process.poll() is None and len(kills) < wanted:
        found = wait_for_actors(tmp_path / "run", process, 3)
        time.sleep(draw.uniform(0, 6))
        lost = draw.sample(found, min(draw.choice([1, 1, 2]), len(found)))
        end(lost, sign)
        kills += [time.time()] * len(lost)
    finish(process, timeout_s=400)
    check(tmp_path / "run", alone, run_ahead)
    assert len(kills) >= wanted, "it has ended too soon"
    print_lost_time(tmp_path / "run", kills)


def test_an_actor_in_lockstep_that_is_stopped_ends_the_run_and_slow_ones_do_not(tmp_path):
    """Each exchange takes longer than `backend.hang_timeout_s`."""
    settings = ["deterministic=true", "run_ahead='off'", "workers=2", "backend.hang_timeout_s=1"]
    process = start(tmp_path / "run", *SLOW[:2], *LASTING, *settings)
    while process.poll() is None and not list((tmp_path / "run" / "checkpoints").glob("*.ckpt")):
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()[1]
    end(actors(tmp_path / "run")[:1], signal.SIGSTOP)
    _, words = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "is lost (no answer for 1 s), and others cannot go on for it in lockstep" in words


def print_lost_time(run_dir: Path, kills: Sequence[float]) -> None:
    """Print by how much longer each step with kills took than the median of those without; `kills` are their times."""
    rows = list(read_steps(run_dir / STEPS))
    ends = [row["ended_at"] for row in rows]
    begins = [ends[0] - rows[0]["metrics"]["timing_s/step"], *ends]
    steps = [
        (end - begin, sum(begin <= kill < end for kill in kills)) for begin, end in zip(begins, ends, strict=False)
    ]
    usual_s = statistics.median(took_s for took_s, count in steps if not count)
    lost_s = [took_s - usual_s for took_s, count in steps if count]
    print(
        f"a step without a kill {usual_s:.2f} s; lost in each with some: {', '.join(f'{each:+.2f}' for each in lost_s)} s"
    )
    print(f"{sum(lost_s) / len(kills):.2f} s for each of {len(kills)} kills")


def left_by(run_dir: Path, folder: Path) -> list[object]:
    """Ray's processes, with the run's environment, and its files."""
    return [*processes(run_dir), *folder.glob("ray-*")]


@pytest.mark.parametrize("run_ahead", ["draft", "keep"])
def test_a_trainer_that_is_killed_resumes_with_new_workers(run_ahead, alone, tmp_path, temporary_folder):
    process = start(tmp_path / "run", *SLOW, f"run_ahead={run_ahead}")
    draw = random.Random(run_ahead)
    for _ in range(2):
        while process.poll() is None and not list((tmp_path / "run" / "checkpoints").glob("*.ckpt")):
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 1.5))
        end([process.pid])
        process.communicate()
        until = time.monotonic() + 60
        while (left := left_by(tmp_path / "run", temporary_folder)) and time.monotonic() < until:
            time.sleep(0.2)
        assert not left, "the cluster outlives its trainer"
        process = start(tmp_path / "run", *SLOW, f"run_ahead={run_ahead}", "ckpt_path=auto")
        time.sleep(8)
    finish(process, timeout_s=300)
    check(tmp_path / "run", alone, run_ahead)
