"""`rhymerl.fit` in a script or a notebook: what the command line gives, for a module and data that are objects."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rhymerl
from rhymerl.algos import GRPO
from rhymerl.cli import main
from rhymerl.errors import ConfigError
from rhymerl.report.steps import STEPS, read_steps
from rhymerl.tasks import RunningSum
from tests.integration.conftest import assert_same, checkpoint
from tests.integration.plain import DIGITS
from tests.integration.training import PROMPTS

SIZES: dict[str, Any] = {"group_size": 4, "max_tokens": 16}
SHORT = ["trainer.max_steps=3", "checkpoint.every_n_steps=1"]
NOTICE = "only this process has the function, so it runs here, where nothing ends a call that hangs"


def parts(model_dir: Path, **more: Any) -> tuple[rhymerl.RhymeModule, rhymerl.PromptDataModule]:
    settings = {"rewards": DIGITS, "drafter": rhymerl.NoDrafter(), "rollout": rhymerl.RolloutSettings(**SIZES), **more}
    task = RunningSum(difficulty=3, train_size=10, validation_size=4)
    return rhymerl.RhymeModule(str(model_dir), **settings), rhymerl.PromptDataModule(task=task, prompts_per_step=4)


def test_it_is_the_run_of_the_command_line(model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module, data = parts(model_dir)
    result = rhymerl.fit(module, data, run_dir=tmp_path / "script", settings=[*SHORT, "samples.print=2"])
    shown = capfd.readouterr()
    assert result == json.loads((tmp_path / "script" / "summary.json").read_text())
    assert shown.err == ""
    for said in (
        r"^model    .* parameters",
        r"^Evaluating on 4 held-out",
        r"^step 3  reward 0\.",
        "Summary",
        "report.html",
    ):
        assert re.search(said, shown.out, re.MULTILINE), said
    assert len(re.findall(r"^ +\d\.\d\d  .+ → ", shown.out, re.MULTILINE)) == 2 * 2, "after the steps 1 and 3"
    words = ["task=running_sum", "task.difficulty=3", "task.train_size=10", "task.validation_size=4"]
    words += ["data.prompts_per_step=4", "rollout.group_size=4", "rollout.max_tokens=16", "drafter=none"]
    words += [f"model.path={model_dir}", f"rewards={DIGITS}", *SHORT, f"run_dir={tmp_path / 'command'}"]
    assert main(["fit", "--config=base", *words]) == 0
    one, two = (checkpoint(tmp_path / name) for name in ("script", "command"))
    assert_same(one["state_dict"], two["state_dict"])
    found, others = ({path.name for path in (tmp_path / name).iterdir()} for name in ("script", "command"))
    assert found == others


def test_settings_of_objects_are_recorded_and_a_named_run_goes_on(model_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    module, data = parts(model_dir, algo=GRPO(clip_high=0.28), reward_workers=2)
    rhymerl.fit(module, data, run_dir=run, settings=SHORT)
    config = (run / "config.yaml").read_text()
    for line in ("clip_high: 0.28", "reward_workers: 2", "train_size: 10", f"path: {model_dir}", "NoDrafter"):
        assert line in config
    assert main(["resume", str(run), "trainer.max_steps=4"]) == 0
    module, data = parts(model_dir, algo=GRPO(clip_high=0.28), reward_workers=2)
    result = rhymerl.fit(module, data, run_dir=run, settings=["trainer.max_steps=5", "ckpt_path=auto"])
    assert result["steps"] == 5
    assert [each["step"] for each in read_steps(run / STEPS) if "metrics" in each] == [1, 2, 3, 4, 5]


def test_a_lambda_and_rows_train_with_one_notice_and_go_on_in_the_script_only(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    module, _ = parts(
        model_dir, rewards=lambda completion, *, answer: float(answer in completion) + len(completion) / 9
    )
    data = rhymerl.PromptDataModule(PROMPTS, PROMPTS[:2], prompts_per_step=3)
    rhymerl.fit(module, data, run_dir=tmp_path, settings=SHORT)
    assert [NOTICE in each for each in caplog.messages].count(True) == 1
    assert "rewards.lambda.function='lambda': " in caplog.text
    assert PROMPTS[0]["prompt"].strip() not in (tmp_path / "config.yaml").read_text()
    capfd.readouterr()
    assert main(["resume", str(tmp_path), "trainer.max_steps=4"]) == 2
    (line,) = (each for each in capfd.readouterr().err.splitlines() if each.startswith("error"))
    assert "data.train" in line or "rewards" in line
    assert rhymerl.fit(module, data, run_dir=tmp_path, settings=[*SHORT, "ckpt_path=auto"])["steps"] == 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "rollout.group_size=2",
            "^settings: rollout.group_size is the module's or the data's, which are given; expected ckpt",
        ),
        ("drafter=none", "^settings: drafter is the module's"),
        ("run_dir=elsewhere", "^settings: run_dir is"),
        ("trainer.max_step=3", "^unknown setting trainer.max_step; did you mean trainer.max_steps"),
        ("samples.print=-1", "^samples.print=-1: expected at least 0"),
    ],
)
def test_settings_that_would_change_nothing_are_refused(
    setting: str, message: str, model_dir: Path, tmp_path: Path
) -> None:
    module, data = parts(model_dir)
    with pytest.raises(ConfigError, match=message.replace("expected ckpt", "expected checkpoint")):
        rhymerl.fit(module, data, run_dir=tmp_path / "run", settings=[setting])
    assert not (tmp_path / "run").exists()


def test_answers_need_the_line_that_they_stand_below(model_dir: Path, tmp_path: Path) -> None:
    module, data = parts(model_dir)
    both = ["samples.print=1", "trainer.enable_progress_bar=false"]
    with pytest.raises(ConfigError, match="^samples.print=1: answers stand below the progress line"):
        rhymerl.fit(module, data, run_dir=tmp_path / "run", settings=both)


SCRIPT = """
import sys, rhymerl

def even(completion):
    return sum(letter in "02468" for letter in completion) / max(len(completion), 1)

module = rhymerl.RhymeModule(sys.argv[1], rewards=even, rollout=rhymerl.RolloutSettings(group_size=4, max_tokens=8))
data = rhymerl.PromptDataModule([{"prompt": f"{number}+1=?"} for number in range(8)], prompts_per_step=4)
rhymerl.fit(module, data, run_dir="run", settings=["trainer.max_steps=2"])
"""


def test_a_script_of_its_own_shows_nothing_of_lightning(model_dir: Path, tmp_path: Path) -> None:
    """Its reward is in `__main__`, as is a notebook's."""
    (tmp_path / "mine.py").write_text(SCRIPT)
    words = [sys.executable, "mine.py", str(model_dir)]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(words, cwd=tmp_path, env={"PYTHONPATH": root}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [
        each for each in done.stderr.splitlines() if each and not each.startswith("Loading weights")
    ]  # of the model
    assert [NOTICE in line for line in lines] == [True]
    assert not re.search("lightning|GPU|TPU|Warning|max_steps.* reached", done.stdout)
    assert (tmp_path / "run" / "report.html").exists()
