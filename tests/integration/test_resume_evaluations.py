"""Evaluations leave no trace in training, and a run that is killed and resumed has each of them exactly once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rhymerl.history import HistoryStore
from rhymerl.training.checkpoint import step_of
from tests.integration import programs
from tests.integration.conftest import assert_same, checkpoint
from tests.integration.ranked import said, start_ranks
from tests.integration.test_ranks_command import RANKS, main

EVERY = 3
DUE = f"evaluation.every_n_steps={EVERY}"
PPO = ["algo=ppo", "critic.head_std=0.1", "critic.learning_rate=1e-2", "critic.warmup_steps=1"]
KEEP = ["run_ahead=keep", "scheduler={_target_: tests.rollout.ranked.RestlessHistoPipe}", "backend.max_running=2"]


def words_for(settings: list[str], run_dir: Path, *more: str, num_steps: int) -> list[str]:
    """Two optimizer steps a rollout step; every step is saved, and every third one evaluated."""
    words = [*settings, DUE, f"trainer.max_steps={2 * num_steps}", f"checkpoint.keep={num_steps}"]
    return [*words, "evaluation.samples=3", "record_rollouts=true", f"run_dir={run_dir}", *more]


def evaluations(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each point of each curve of the evaluations."""
    return {name: points for name, points in curves(run_dir).items() if name.startswith("eval/")}


def curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: sorted((each.step, each.value) for each in events.Scalars(name)) for name in names}


def run(words: list[str], tmp_path: Path) -> None:
    """Run in a process of its own: a reader of curves knows the order of their files by process only."""
    process = programs.start(words, tmp_path / "output")
    process.join(600)
    assert process.exitcode == 0, (tmp_path / "output").read_text()


def learned(run_dir: Path, name: str = "last") -> dict[str, Any]:
    """All of a checkpoint that a later step may depend on."""
    saved = checkpoint(run_dir, name)
    return {
        "weights": saved["state_dict"],
        "optimizer": saved["optimizer_states"],
        "schedules": saved["lr_schedulers"],
        "module": {name: value for name, value in saved["rhymerl"].items() if name != "logged"},
    }


def assert_whole(run_dir: Path, whole: Path, *, num_steps: int) -> None:
    """The same in the end, and each evaluation once."""
    assert_same(learned(run_dir), learned(whole))
    due = [0, *range(2 * EVERY, 2 * num_steps + 1, 2 * EVERY), *([2 * num_steps] if num_steps % EVERY else [])]
    assert [step for step, _ in evaluations(whole)["eval/reward"]] == due
    assert evaluations(run_dir) == evaluations(whole)
    assert (run_dir / "rollouts.jsonl.gz").read_bytes() == (whole / "rollouts.jsonl.gz").read_bytes()
    steps = [step for step, _ in curves(whole)["reward"]]
    assert steps == list(range(2, 2 * num_steps + 1, 2))
    assert [step for step, _ in curves(run_dir)["reward"]] == steps


# -- no trace in training --------------------------------------------------------------------------------------------


def of_training(run_dir: Path) -> dict[str, Any]:
    saved = learned(run_dir)
    module = saved["module"]
    del module["evaluator"]
    history = HistoryStore()
    history.load_state_dict(module.pop("history"))
    answers = [(each.key, each.added) for each in history.snapshot() if each.split == "train"]
    return {**saved, "answers": answers}


def test_a_run_without_evaluations_is_the_same_one(settings, tmp_path):
    """Also for a scheduler that remembers what it has planned."""
    for name, more in (("with", []), ("without", ["evaluation.every_n_steps=0", "trainer.limit_val_batches=0"])):
        run(words_for(settings, tmp_path / name, "scheduler=histopipe", *more, num_steps=7), tmp_path)
    assert len(evaluations(tmp_path / "with")["eval/reward"]) == 4
    assert evaluations(tmp_path / "without") == {}
    assert_same(of_training(tmp_path / "with"), of_training(tmp_path / "without"))
    one, two = ((tmp_path / name / "rollouts.jsonl.gz").read_bytes() for name in ("with", "without"))
    assert one == two


# -- resumed from any checkpoint -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "steps"), [([], [4]), pytest.param(PPO, [3], marks=pytest.mark.slow)], ids=["grpo", "ppo"]
)
def test_from_checkpoints_at_which_an_evaluation_is_due(more, steps, settings, tmp_path):
    """And from another one beside them."""
    from_every_checkpoint(settings, tmp_path, more, steps=steps, num_steps=7)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], PPO], ids=["grpo", "ppo"])
def test_from_each_of_thirty_checkpoints(more, settings, tmp_path):
    from_every_checkpoint(settings, tmp_path, more, steps=list(range(1, 31)), num_steps=30)


def from_every_checkpoint(
    settings: list[str], tmp_path: Path, more: list[str], *, steps: list[int], num_steps: int
) -> None:
    whole = tmp_path / "whole"
    run(words_for(settings, whole, *more, num_steps=num_steps), tmp_path)
    for step in steps:
        run_dir = tmp_path / f"from {step}"
        start = f"ckpt_path={whole / 'checkpoints' / f'step={step}.ckpt'}"
        run(words_for(settings, run_dir, *more, start, num_steps=num_steps), tmp_path)
        if step < num_steps:
            assert_same(learned(run_dir), learned(whole))
        for name, points in evaluations(whole).items():
            assert evaluations(run_dir)[name] == [point for point in points if point[0] >= 2 * step]


# -- killed at any instant -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("more", [[], pytest.param(PPO, marks=pytest.mark.slow)], ids=["grpo", "ppo"])
def test_a_chain_of_kills(more, num_kills, settings, tmp_path):
    num_steps = 6 * num_kills
    run(words_for(settings, tmp_path / "whole", *more, num_steps=num_steps), tmp_path)
    words = words_for(settings, tmp_path / "run", *more, "ckpt_path=auto", num_steps=num_steps)
    killed_again_and_again(lambda: [programs.start(words, tmp_path / "output")], tmp_path / "run", num_kills, 0.25)
    run(words, tmp_path)
    assert_whole(tmp_path / "run", tmp_path / "whole", num_steps=num_steps)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_chain_of_kills_of_two_ranks_that_keep_what_they_prefetched(settings, tmp_path):
    num_steps = 100

    def start(name: str) -> list[Any]:
        words = words_for(settings, tmp_path / name, *RANKS, *KEEP, "ckpt_path=auto", num_steps=num_steps)
        return start_ranks(2, main, words, output=tmp_path / "output")

    def end(name: str) -> None:
        processes = start(name)
        for process in processes:
            process.join(600)
        codes = [process.exitcode for process in processes]
        assert codes == [0, 0], "\n".join(said(tmp_path / "output", rank) for rank in range(2))

    end("whole")
    killed_again_and_again(lambda: start("run"), tmp_path / "run", 20, 0.5)
    end("run")
    assert_whole(tmp_path / "run", tmp_path / "whole", num_steps=num_steps)


def killed_again_and_again(start: Callable[[], list[Any]], run_dir: Path, num_kills: int, spread_s: float) -> None:
    """One of the processes each time, at any instant after the first step that it has saved."""
    reached = [0]
    source = random.Random(f"{num_kills}/{spread_s}")
    for _ in range(num_kills):
        processes = start()
        while all(process.is_alive() for process in processes) and last_step(run_dir) == reached[-1]:
            time.sleep(0.005)
        time.sleep(source.uniform(0, spread_s))
        victim = source.choice(processes)
        was_alive = victim.is_alive()
        victim.kill()
        for process in processes:
            process.join(600)
            process.kill()
            process.join()
        assert was_alive, "it was finished before it could be killed"
        reached.append(last_step(run_dir))
    assert reached == sorted(set(reached)), "each part has gone on"


def last_step(run_dir: Path) -> int:
    link = run_dir / "checkpoints" / "last.ckpt"
    return step_of(link.resolve()) or 0
