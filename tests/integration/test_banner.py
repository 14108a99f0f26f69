"""The words before the first step, and after a run has ended too early."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest

from rhymerl.distributed.first import is_first_rank
from rhymerl.runs.banner import how_to_go_on
from tests.integration.conftest import Run

ROOT = Path(__file__).parents[2]


class Boom(L.Callback):
    """Raises in front of the third step."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: object) -> None:
        if pl_module.num_rollouts == 2:
            raise ValueError("out of luck")


BOOM = "trainer.callbacks=[{_target_: tests.integration.test_banner.Boom}]"


def test_what_is_trained_on_what_and_where(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    run_dir = tmp_path / "run[1]"  # no markup
    done = rhymerl(*settings, f"run_dir='{run_dir}'", "trainer.max_steps=12", "trainer.accelerator=cpu")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("model    "))
    assert re.fullmatch(r"model    \w+ForCausalLM, [\d,]+ parameters, all trained", lines[first])
    assert lines[first + 1 : first + 5] == [
        "device   cpu, 32-true",
        "prompts  10, 4 a step with 4 answers each; 4 held out",
        f"run_dir  {run_dir}",
        "Evaluating on 4 held-out prompts",
    ]
    assert re.search(r"^step 6  reward \d\.\d+ .* tok/s  about \d+ s left$", done.out, re.MULTILINE)
    assert "Tip" not in done.out + done.err


@pytest.mark.parametrize(
    "words", [["model.dtype=bfloat16"], pytest.param(["trainer.precision=bf16-mixed"], marks=pytest.mark.slow), []]
)
def test_what_equality_means_in_bfloat16(words: list[str], settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    done = rhymerl(*settings, f"run_dir={tmp_path / 'run'}", "trainer.max_steps=1", *words)
    assert done.code == 0, done.err
    found = re.findall(r"^rounding bfloat16: another drafter may change single tokens.*$", done.out, re.MULTILINE)
    assert len(found) == bool(words)


def test_adapters_are_what_is_trained(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    pytest.importorskip("peft")
    done = rhymerl(*settings, "adapter=lora", f"run_dir={tmp_path / 'run'}", "trainer.max_steps=2")
    assert done.code == 0, done.err
    total, trained = re.search(r"model    .*, ([\d,]+) parameters, ([\d,]+) trained", done.out).groups()
    assert 0 < int(trained.replace(",", "")) < int(total.replace(",", ""))


@pytest.mark.parametrize("command", [pytest.param("fit", marks=pytest.mark.slow), "resume"])
def test_a_crash_says_how_to_go_on(command: str, settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    run_dir = tmp_path / "my run"
    done = rhymerl(*settings, f"run_dir={run_dir}", BOOM, "drafter=none")
    assert done.code == 1
    if command == "resume":
        done = rhymerl("resume", str(run_dir))
    assert done.err.splitlines() == [
        "error: ValueError: out of luck (--debug shows where)",
        f"The run in {run_dir} is saved up to step 2; to go on: rhymerl resume '{run_dir}'",
    ]
    assert rhymerl("resume", str(run_dir), "trainer.callbacks=null").code == 0


def test_a_crash_without_a_checkpoint_does_not(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    done = rhymerl(*settings, f"run_dir={tmp_path / 'run'}", BOOM, "checkpoint.every_n_steps=100", "drafter=none")
    assert done.err == "error: ValueError: out of luck (--debug shows where)\n"
    assert how_to_go_on(tmp_path / "run") is None


def test_wrong_input_does_not(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    words = [*settings, f"run_dir={tmp_path / 'run'}", "trainer.max_steps=2", "drafter=none"]
    assert rhymerl(*words).code == 0
    done = rhymerl(*words)
    assert (done.code, done.err.count("\n")) == (2, 1)


def test_a_run_that_was_stopped_says_how_to_go_on(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    stop = "algo={_target_: tests.integration.programs.DieInUpdate, call: 3, signal: 2}"
    done = rhymerl(*settings, f"run_dir={tmp_path / 'run'}", stop, "drafter=none")
    assert done.code == 130
    last = done.out.splitlines()[-1]
    assert last == f"The run in {tmp_path / 'run'} is saved up to step 2; to go on: rhymerl resume {tmp_path / 'run'}"


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "--config=quickstart"],
        *(pytest.param([each], marks=pytest.mark.slow) for each in ("rollout", "warmstart")),
    ],
    ids=lambda each: each[0],
)
def test_something_is_said_before_libraries_are_loaded(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch comes now')")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    program = [sys.executable, "-m", "rhymerl", *words]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert re.fullmatch(rf"rhymerl {words[0]}, \w+: loading torch and Lightning\n", done.stdout), done.stderr
    shown = subprocess.run([*program, "--json"], capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert shown.stdout == ""
    assert ": loading torch and Lightning" in shown.stderr


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [({}, True), ({"LOCAL_RANK": "0"}, True), ({"LOCAL_RANK": "1"}, False), ({"RANK": "4", "LOCAL_RANK": "0"}, False)],
    ids=str,
)
def test_one_rank_speaks_before_lightning_is_there(
    variables: dict[str, str], is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "lightning.fabric.utilities.rank_zero", raising=False)
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_first_rank() == is_first
