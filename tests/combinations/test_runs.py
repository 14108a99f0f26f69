"""Whole runs in which every two settings meet: each ends, with finite figures and one policy on both sides."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rhymerl.history.traces import read_trace
from tests.combinations.conftest import Folder
from tests.combinations.covering import Pair, Row
from tests.combinations.factors import FACTORS, FORBIDDEN, ROWS, TEACHER, plainest, words_of
from tests.integration.conftest import Run, assert_same, checkpoint
from tests.integration.ranked import run_ranks
from tests.models.windowed import InDouble

STEPS = 4  # two passes over the problems
COMMON = [
    "fit",
    "--config=quickstart",
    "task.difficulty=2",
    "task.train_size=8",
    "task.validation_size=4",
    "data.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=20",
    "rollout.reply_timeout_s=600",  # a busy machine is no fault of an environment
    "update.mini_batches=2",
    "update.warmup_steps=0",
    "update.learning_rate=3e-3",
    "update.micro_batch_tokens=256",
    "rewards={digits: tests.integration.rewards.digits}",
    "checkpoint.every_n_steps=1",
    "checkpoint.keep=9",
    "trainer.accelerator=cpu",
    "logger=csv",
    "record_rollouts=true",
]
# The most that a log-prob of the update may differ from the engine's on average, in nats.
BOUNDS = {"64-true": 1e-6, "32-true": 1e-3, "bf16-true": 0.1, "bf16-mixed": 0.1}


def main(words: Sequence[str], in_double: bool) -> None:
    from rhymerl.cli import main

    with InDouble() if in_double else nullcontext():
        sys.exit(main(list(words)))


class Runs:
    """Runs of one row in folders below `path`."""

    def __init__(self, row: Row, path: Path, folder_of: Folder, rhymerl: Run, *, in_double: bool = False) -> None:
        self.row, self.path, self._rhymerl, self._in_double = row, path, rhymerl, in_double
        family, is_chat = row["model"], row["task"] == "rerendered"
        words = [*COMMON, *words_of(row)]
        teacher = str(folder_of(family, seed=5, is_chat=is_chat)) if TEACHER in " ".join(words) else ""
        steps = STEPS * 2 * (2 if row["extra"] == "epochs" else 1)
        self.words = [
            *(word.replace(TEACHER, teacher) for word in words),
            f"model.path={folder_of(family, is_chat=is_chat)}",
            f"trainer.max_steps={steps}",
        ]

    def run(self, name: str, *more: str) -> Path:
        """The folder of a run with these further words, which has ended well."""
        folder = self.path / name
        self.path.mkdir(exist_ok=True)
        words = [*self.words, *more, f"run_dir={folder}"]
        if self.row["ranks"] == "2":
            run_ranks(2, main, words, self._in_double, output=self.path / f"{name}.output")
        else:
            with InDouble() if self._in_double else nullcontext():
                done = self._rhymerl(*words)
            assert done.code == 0, done.err
        return folder


def metrics_of(run: Path) -> dict[str, list[float]]:
    (path,) = run.rglob("metrics.csv")
    found: dict[str, list[float]] = {}
    for row in csv.DictReader(path.read_text().splitlines()):
        for name, value in row.items():
            if value:
                found.setdefault(name, []).append(float(value))
    return found


def answers_of(run: Path) -> list[tuple[Any, ...]]:
    return [
        (each.epoch, each.prompt_id, each.sample, each.response_tokens.tolist(), each.reward)
        for each in read_trace(run / "rollouts.jsonl.gz")
    ]


def name_of(row: Row) -> str:
    plain = {name: values[0] for name, values in FACTORS.items()}
    return "-".join([str(ROWS.index(row)), *(value for name, value in row.items() if value != plain[name])])


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_run_of_it_ends_well(
    row: Row, tmp_path: Path, folder_of: Folder, rhymerl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Where a layer is computed again in the backward, it is so in float32, as transformers does.
    in_double = row["precision"] == "64-true" and row["extra"] != "checkpointing"
    runs = Runs(row, tmp_path, folder_of, rhymerl, in_double=in_double)
    run = runs.run("run")
    summary, metrics = json.loads((run / "summary.json").read_text()), metrics_of(run)
    assert summary["steps"] == STEPS
    assert all(math.isfinite(each) for each in summary.values() if isinstance(each, int | float))
    assert not [name for name, values in metrics.items() if not all(map(math.isfinite, values))]
    # In the engine a newer policy goes on with the experts that an older one chose; the update, only where it replays.
    takes_others = (row["run_ahead"], row["replay"]) == ("keep", "off") and row["model"] in ("qwen2_moe", "deepseek_v3")
    if not takes_others:
        assert max(metrics["sampling/sampling_logp_difference/precision"]) <= BOUNDS[row["precision"]]
    assert max(metrics["sampling/nonfinite_tokens"]) == max(metrics["rewards/digits/errors"]) == 0
    assert max(metrics.get("spec/bad_drafts", [0])) == 0
    assert max(metrics["off_policy/staleness/max"]) <= (row["run_ahead"] == "keep")
    if row["precision"] == "64-true" and row != plainest(row) and row["run_ahead"] != "keep":
        plain = Runs(plainest(row), tmp_path / "plain", folder_of, rhymerl, in_double=in_double).run("run")
        assert answers_of(run) == answers_of(plain)
        weights, expected = (checkpoint(each)["state_dict"] for each in (run, plain))
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-8 if in_double else 1e-4, msg=name)
    if row["extra"] == "resumed":
        later = runs.run("later", f"ckpt_path={run / 'checkpoints' / f'step={STEPS // 2}.ckpt'}")
        # The state of random drafts is in no checkpoint, so that passes have other shapes, as where the clock counts.
        if row["drafter"] != "random" and row["clock"] == "passes":
            assert_same(checkpoint(later)["state_dict"], checkpoint(run)["state_dict"])


@pytest.mark.slow
@pytest.mark.parametrize("pair", FORBIDDEN, ids=lambda pair: "-".join(sorted(value for _, value in pair)))
def test_what_is_forbidden_is_refused_in_one_line(pair: Pair, tmp_path: Path, folder_of: Folder, rhymerl: Run) -> None:
    plain = {name: values[0] for name, values in FACTORS.items()}
    done = rhymerl(*Runs({**plain, **dict(pair)}, tmp_path, folder_of, rhymerl).words, f"run_dir={tmp_path / 'run'}")
    assert done.code == 2
    assert done.err.startswith(f"error: {FORBIDDEN[pair]}")
    assert done.err.count("\n") == 1
