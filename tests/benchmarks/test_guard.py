"""Tests for guard.py and turns.py of benchmarks/regression: steps of two runs are compared while they take turns."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.regression import guard
from benchmarks.regression.turns import Turns


def run(turns: Any, name: str, steps: int, log: list[str]) -> None:
    for step in range(steps):
        turns.on_train_batch_start()
        log.append(f"{name}{step}")
    turns.on_train_end()
    turns._socket.close()  # as at the end of its process


@pytest.mark.parametrize("steps", [(3, 3), (1, 4), (4, 1)])
def test_two_runs_take_turns_and_one_that_is_left_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, int]
) -> None:
    log, threads = [], []
    for name, count, end in zip("ab", steps, socket.socketpair(), strict=True):
        monkeypatch.setenv("TURNS_SOCKET", str(end.detach()))
        monkeypatch.setenv("TURNS_FIRST", str(int(name == "a")))
        turns = Turns(str(tmp_path / f"{name}.json"))
        threads.append(threading.Thread(target=run, args=(turns, name, count, log), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    both = min(steps)
    assert log[: 2 * both] == [f"{name}{step}" for step in range(both) for name in "ab"]
    assert len(log) == sum(steps)
    assert [len(json.loads((tmp_path / f"{name}.json").read_text())) for name in "ab"] == list(steps)


def test_a_ratio_compares_step_with_step() -> None:
    assert guard.ratio([1.0, 2.0, 10.0], [1.1, 2.2, 30.0]) == pytest.approx(1.1)


def test_what_runs_beside_a_base_that_cannot_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says more than a pipe holds, too."""
    runs = []
    programs = {"base": "raise SystemExit(2)", "new": "print('x' * 200_000); import time; time.sleep(0.5)"}

    def start(tree: Any, *words: str, **turns: Any) -> Any:
        words = (sys.executable, "-c", programs[tree.name])
        pipe = subprocess.PIPE
        runs.append(guard.Running(tree, words, subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True)))
        return runs[-1]

    monkeypatch.setattr(guard.Tree, "start", start)
    trees = [guard.Tree(name, tmp_path, tmp_path) for name in ("base", "new")]
    with pytest.raises(guard.NotInBaseError):
        guard.fit(trees, "echo")
    assert [run.process.poll() for run in runs] == [2, 0]
