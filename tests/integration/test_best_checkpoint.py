"""`checkpoint.monitor`: the checkpoint of the best evaluation stays, whatever is saved after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import Run, checkpoint

MONITOR = ["checkpoint.monitor=eval/reward", "evaluation.every_n_steps=1", "checkpoint.keep=1"]


def values_of(run_dir: Path) -> dict[int, float]:
    from rhymerl.report.steps import STEPS, read_steps

    lines = read_steps(run_dir / STEPS)
    return {line["step"]: line["evaluation"]["eval/reward"] for line in lines if "evaluation" in line and line["step"]}


@pytest.mark.parametrize(("mode", "every"), [pytest.param("max", 1, marks=pytest.mark.slow), ("min", 4)])
def test_the_best_step_stays(mode: str, every: int, settings: list[str], rhymerl: Run, tmp_path: Path) -> None:
    """Also at a step that would have had no checkpoint; of equal values the first."""
    run_dir = tmp_path / "run"
    words = [*MONITOR, f"checkpoint.mode={mode}", f"checkpoint.every_n_steps={every}", f"run_dir={run_dir}"]
    assert rhymerl(*settings, *words).code == 0
    values = values_of(run_dir)
    best = (max if mode == "max" else min)(values, key=lambda step: values[step])
    found = json.loads((run_dir / "checkpoints" / "best.json").read_text())
    assert found == {"monitor": "eval/reward", "mode": mode, "value": values[best], "step": best}
    assert (run_dir / "checkpoints" / "best.ckpt").resolve().name == f"step={best}.ckpt"
    assert checkpoint(run_dir, "best")["rhymerl"]["num_rollouts"] == best
    there = {path.name for path in (run_dir / "checkpoints").glob("step=*.ckpt")}
    assert there == {f"step={best}.ckpt", "step=6.ckpt"}
    done = rhymerl("evaluate", str(run_dir), "ckpt_path=best", "--json")
    assert json.loads(done.out)["eval/reward"] == values[best]


def test_a_resumed_run_knows_the_best_before(settings: list[str], rhymerl: Run, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [*settings, *MONITOR, f"run_dir={run_dir}"]
    assert rhymerl(*words, "trainer.max_steps=2").code == 0
    path = run_dir / "checkpoints" / "best.json"
    record = {**json.loads(path.read_text()), "value": 1e6}
    path.write_text(json.dumps(record))
    assert rhymerl("resume", str(run_dir), "trainer.max_steps=6").code == 0
    assert json.loads(path.read_text()) == record
    assert (run_dir / "checkpoints" / "step=1.ckpt").exists()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "checkpoint.monitor=reward",
            "checkpoint.monitor='reward': expected a metric of evaluations such as eval/reward",
        ),
        (
            "checkpoint.monitor=eval/rewards",
            "checkpoint.monitor='eval/rewards': no metric of the evaluation; it has eval/",
        ),
        ("checkpoint.mode=best", "checkpoint.mode='best': expected max or min"),
        ("trainer.limit_val_batches=0", "checkpoint.monitor='eval/reward': there is nothing to evaluate on"),
    ],
)
def test_what_cannot_be_monitored_is_refused(
    word: str, message: str, settings: list[str], rhymerl: Run, tmp_path: Path
) -> None:
    done = rhymerl(*settings, *MONITOR, word, f"run_dir={tmp_path / 'run'}")
    assert done.code == 2
    assert message in done.err
    assert not list(tmp_path.rglob("*.ckpt"))
