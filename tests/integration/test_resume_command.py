"""`rhymerl resume RUN`, `evaluate RUN` and `ckpt_path=auto` take the newest whole checkpoint, with changed settings."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rhymerl.testing import tiny_policy
from rhymerl.training.checkpoint import FORMAT
from tests.integration import programs
from tests.integration.conftest import Run, assert_same, checkpoint, made_once, rows

HALF = "trainer.max_steps=6"  # three rollout steps of six


@pytest.fixture(scope="module")
def half_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("half") / "run"


@pytest.fixture
def constant(settings: list[str]) -> list[str]:
    return [*settings, "update.lr_schedule=constant"]


@pytest.fixture
def half(half_dir: Path, constant: list[str], tmp_path: Path, rhymerl: Run) -> Path:
    """A copy of a run of three steps; made once."""
    made_once(half_dir, [*constant, HALF, f"run_dir={half_dir}"], rhymerl)
    return Path(shutil.copytree(half_dir, tmp_path / "run", symlinks=True))


@pytest.fixture
def whole(whole_dir: Path, constant: list[str], rhymerl: Run) -> Path:
    """The run that was never interrupted; made once."""
    return made_once(whole_dir, [*constant, f"run_dir={whole_dir}"], rhymerl)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# -- going on --------------------------------------------------------------------------------------------------------


def test_resume_goes_on_where_the_run_is(half: Path, whole: Path, rhymerl: Run) -> None:
    """The run is in another place than it was made in, and keeps its own settings."""
    done = rhymerl("resume", "trainer.max_steps=12", str(half))
    assert done.code == 0, done.err
    assert_same(checkpoint(half)["state_dict"], checkpoint(whole)["state_dict"])
    step = half / "checkpoints" / "step=3.ckpt"
    assert f"Going on from {step}, after step 3" in done.out
    assert "Changed since then: trainer.max_steps 6 -> 12\n" in done.out
    assert f"The former settings are in {half / 'config.1.yaml'}" in done.out
    before, now = (yaml.safe_load((half / name).read_text()) for name in ("config.1.yaml", "config.yaml"))
    assert (before["trainer"]["max_steps"], now["trainer"]["max_steps"]) == (6, 12)
    assert now["ckpt_path"] is None
    assert now["run_dir"] == str(half)


def test_a_finished_run_says_so_and_is_left_as_it_is(half: Path, rhymerl: Run) -> None:
    before = {path: path.read_bytes() for path in sorted(half.rglob("*")) if path.is_file()}
    for words in (["resume", str(half)], ["resume", str(half), "update.learning_rate=1"]):
        done = rhymerl(*words)
        assert (done.code, done.err) == (0, "")
        assert done.out == (
            f"The run in {half} is finished: 3 steps, trainer.max_steps=6. A higher number there makes it go on.\n"
        )
    done = rhymerl("resume", str(half), "--json")
    assert json.loads(done.out) == json.loads((half / "summary.json").read_text())
    assert {path: path.read_bytes() for path in sorted(half.rglob("*")) if path.is_file()} == before


def test_a_run_that_lacks_its_last_evaluation_is_not_finished(half: Path, rhymerl: Run) -> None:
    """It was killed after its last step."""
    summary = json.loads((half / "summary.json").read_text())
    for left in (None, {**summary, "eval_reward_after": None}, {**summary, "steps": 2}):
        (half / "summary.json").unlink() if left is None else (half / "summary.json").write_text(json.dumps(left))
        done = rhymerl("resume", str(half))
        assert done.code == 0, done.err
        assert "Evaluating on 4 held-out prompts" in done.out
        again = json.loads((half / "summary.json").read_text())
        timeless = [name for name in summary if "speedup" not in name]
        assert list(again) == list(summary)
        assert {name: again[name] for name in timeless} == {name: summary[name] for name in timeless}


def test_auto_starts_where_there_is_nothing_and_goes_on_where_there_is_something(
    constant: list[str], whole: Path, tmp_path: Path, rhymerl: Run
) -> None:
    """The same words every time, as in a job that is put back into a queue; killed before its first checkpoint, too."""
    words = [*constant, f"run_dir={tmp_path / 'run'}", "ckpt_path=auto", "record_rollouts=true"]
    for call in (1, 5):
        dies = f"algo={{_target_: tests.integration.programs.DieInUpdate, call: {call}}}"
        process = programs.start([*words, dies], tmp_path / "output")
        process.join(600)
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "output").read_text()
        assert (tmp_path / "run" / "checkpoints").exists() == (call > 1)
    done = rhymerl(*words)
    assert done.code == 0, done.err
    assert_same(checkpoint(tmp_path / "run")["state_dict"], checkpoint(whole)["state_dict"])
    assert rhymerl(*words).out.startswith(f"The run in {tmp_path / 'run'} is finished")
    assert len(list(tmp_path.glob("run/config*.yaml"))) == 3, "the two with a killer, and the last one"


def test_auto_passes_over_damaged_checkpoints_and_says_so(half: Path, whole: Path, rhymerl: Run) -> None:
    newest, older = (half / "checkpoints" / f"step={step}.ckpt" for step in (3, 2))
    damage(newest)
    done = rhymerl("resume", str(half), "trainer.max_steps=12", "ckpt_path=last")
    assert done.code == 2
    assert done.err.startswith(f"error: ckpt_path='{half}/checkpoints/last.ckpt': not a checkpoint that can be read: ")
    assert done.err.endswith(f"the newest whole one before it is '{older}', which ckpt_path=auto takes\n")
    for command in (["export", str(half), str(half / "out")], ["export", str(newest), str(half / "out")]):
        done = rhymerl(*command)
        assert done.code == 2
        assert done.err.startswith("error: RUN='")
        assert str(older) in done.err
        assert not (half / "out").exists()
    done = rhymerl("evaluate", str(half), f"ckpt_path={newest}")
    assert done.code == 2
    assert str(older) in done.err
    done = rhymerl("resume", str(half), "trainer.max_steps=12")
    assert done.code == 0, done.err
    assert f"{newest} is damaged: " in done.out
    assert f"Going on from {older}, after step 2" in done.out
    assert_same(checkpoint(half)["state_dict"], checkpoint(whole)["state_dict"])


def test_auto_does_not_start_anew_where_nothing_is_whole(half: Path, rhymerl: Run) -> None:
    for path in (half / "checkpoints").glob("step=*.ckpt"):
        damage(path)
    done = rhymerl("resume", str(half), "trainer.max_steps=12")
    assert done.code == 2
    assert done.err.startswith(f"error: ckpt_path='auto': no checkpoint of run_dir='{half}' is whole (")
    assert done.err.count("\n") == 1


# -- with other settings -----------------------------------------------------------------------------------------------


class Rates(programs.KeepMetrics):
    """The learning rate of every optimizer step's end, kept in no checkpoint."""

    seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        Rates.seen.append(float(trainer.callback_metrics["learning_rate"]))
        group = trainer.optimizers[0].param_groups[0]
        assert group["weight_decay"] == 0.25
        assert group["betas"] == (0.5, 0.75)


def test_changed_settings_of_the_optimizer_hold_from_the_next_step_on(half: Path, rhymerl: Run) -> None:
    Rates.seen.clear()
    more = ["update.learning_rate=1e-3", "update.weight_decay=0.25", "update.betas=[0.5,0.75]", "evaluation.samples=2"]
    watch = "trainer.callbacks=[{_target_: tests.integration.test_resume_command.Rates}]"
    done = rhymerl("resume", str(half), "trainer.max_steps=10", *more, watch)
    assert done.code == 0, done.err
    assert Rates.seen == pytest.approx([1e-3, 1e-3])
    for change in (
        "update.learning_rate 0.01 -> 0.001",
        "update.weight_decay 0.0 -> 0.25",
        "evaluation.samples 1 -> 2",
        "trainer.max_steps 6 -> 10",
    ):
        assert change in done.out
    assert "module." not in done.out, "a setting is told once"
    saved = checkpoint(half)
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == 1e-3
    assert saved["lr_schedulers"][0]["base_lrs"] == [1e-3, 1e-3]


def test_a_schedule_goes_on_from_its_place_at_the_new_rate(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    """Linear over 12 steps, of which 3 are the warm-up."""
    words = [*settings, f"run_dir={tmp_path / 'run'}"]
    stops = f"algo={{_target_: tests.integration.programs.DieInUpdate, call: 6, signal: {int(signal.SIGINT)}}}"
    process = programs.start([*words, stops], tmp_path / "output")
    process.join(600)
    assert process.exitcode == 130, (tmp_path / "output").read_text()
    assert rhymerl(*words, "ckpt_path=auto", "update.learning_rate=1e-4").code == 0
    last = checkpoint(tmp_path / "run", "step=5")["lr_schedulers"][0]
    assert last["_last_lr"] == pytest.approx([1e-4 * 2 / 9] * 2)


OTHER_PARTS = ("budget=fixed", "scheduler=histopipe", "drafter=none")


@pytest.mark.parametrize(
    "more", [["algo=rloo"], *(pytest.param([each], marks=pytest.mark.slow) for each in OTHER_PARTS)], ids=str
)
def test_another_part_begins_anew(more: list[str], half: Path, rhymerl: Run) -> None:
    """The state that one class has learned is no state of another."""
    done = rhymerl("resume", str(half), "trainer.max_steps=12", *more)
    assert done.code == 0, done.err
    assert f"Changed since then: {more[0].partition('=')[0]}." in done.out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["data.prompts_per_step=5"], "data.prompts_per_step=5: the checkpoint was written with 4"),
        (["task.train_size=11"], "data.train: 11 prompts, but the checkpoint was written with 10"),
        (["model.path=OTHER"], "its run started from other weights than those of model.path"),
        (["model.dtype=float64"], "its run started from other weights than those of model.path or model.init (as model.dtype"),
        (["model.characters=0123"], "model.characters='0123': the checkpoint was written with '0123456789+=;#? \\n'"),
        (["critic.shared=true"], "critic.shared=True: the checkpoint was written with False; a resumed run cannot change it"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_changed_is_refused(
    more: list[str], message: str, half: Path, tmp_path: Path, rhymerl: Run
) -> None:
    """The other model has the very same shapes."""
    tiny_policy(dtype="float32", context=128, peaked=2.0, seed=1).save(tmp_path / "other")
    before = {path: path.read_bytes() for path in sorted(half.rglob("*")) if path.is_file()}
    more = [word.replace("OTHER", str(tmp_path / "other")) for word in more]
    done = rhymerl("resume", str(half), "trainer.max_steps=12", *more)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert {path: path.read_bytes() for path in sorted(half.rglob("*")) if path.is_file()} == before


def test_the_same_weights_in_another_place_are_the_same_model(
    half: Path, model_dir: Path, tmp_path: Path, rhymerl: Run
) -> None:
    shutil.copytree(model_dir, tmp_path / "moved")
    done = rhymerl("resume", str(half), "trainer.max_steps=8", f"model.path={tmp_path / 'moved'}")
    assert done.code == 0, done.err
    assert f"model.path {model_dir} -> {tmp_path / 'moved'}" in done.out.replace("\n", "")


def test_a_checkpoint_of_another_version_is_one_clear_line(half: Path, rhymerl: Run) -> None:
    path = half / "checkpoints" / "step=3.ckpt"
    saved = torch.load(path, weights_only=True)
    saved["rhymerl"]["format"] = 1
    torch.save(saved, path)
    for words in (["resume", str(half), "trainer.max_steps=8"], ["evaluate", str(half)], ["export", str(half), "out"]):
        done = rhymerl(*words)
        assert done.code == 2
        assert f"its format is 1, and this version of rhymerl reads {FORMAT}" in done.err
        assert done.err.count("\n") == 1


# -- evaluating --------------------------------------------------------------------------------------------------------


def test_evaluate_takes_a_runs_newest_checkpoint_and_writes_the_answers(half: Path, rhymerl: Run) -> None:
    done = rhymerl("evaluate", str(half), "--json")
    assert done.code == 0, done.err
    result, summary = json.loads(done.out), json.loads((half / "summary.json").read_text())
    assert result["eval/reward"] == summary["eval_reward_after"]
    path = half / "evaluations" / "step=3.jsonl"
    assert f"The answers are in {path}" in done.err
    assert f"Evaluating {half / 'checkpoints' / 'step=3.ckpt'}, after step 3" in done.err
    answers = rows(path)
    assert len(answers) == 4
    assert answers[0].keys() == {
        "set", "prompt", "response", "reward", "length", "finish_reason", "prompt_id", "sample", "rewards", "columns"
    }  # fmt: skip
    assert sum(row["reward"] for row in answers) / 4 == pytest.approx(result["eval/reward"], abs=1e-4)
    assert all(row["rewards"].keys() == {"digits"} and "answer" in row["columns"] for row in answers)
    first = path.read_bytes()
    done = rhymerl("evaluate", "evaluation.samples=2", str(half), "ckpt_path=" + str(half / "checkpoints/step=2.ckpt"))
    assert done.code == 0, done.err
    assert len(rows(half / "evaluations" / "step=2.jsonl")) == 8
    assert rhymerl("evaluate", str(half)).code == 0
    assert path.read_bytes() == first == (half / "evaluations" / "step=3-2.jsonl").read_bytes()
    assert not (half / "run.lock").exists()


def test_evaluate_needs_no_training_data(model_dir: Path, tmp_path: Path, monkeypatch: Any, rhymerl: Run) -> None:
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"prompt": "1+1=?\n", "answer": "2"}) + "\n"
    for name in ("train", "held_out"):
        Path(f"{name}.jsonl").write_text(row * 2)
    words = ["--config=grpo_jsonl", f"model.path={model_dir}", "rollout.max_tokens=8", "rollout.group_size=2"]
    done = rhymerl("evaluate", *words, "data.validation=held_out.jsonl", "run_dir=none")
    assert done.code == 0, done.err
    assert [str(path) for path in Path("none").rglob("*.jsonl")] == ["none/evaluations/step=0.jsonl"]
    files = ["data.train=train.jsonl", "data.validation=held_out.jsonl"]
    assert rhymerl("fit", *words, *files, "run_dir=run", "trainer.max_steps=1").code == 0
    Path("train.jsonl").unlink()
    assert rhymerl("evaluate", "run").code == 0
    done = rhymerl("resume", "run", "trainer.max_steps=2")
    assert (done.code, done.err) == (
        2,
        "error: data.train='train.jsonl': no such file; expected a .jsonl, .csv, .tsv (each also .gz) or .parquet file\n",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resume"], "rhymerl resume needs RUN: the directory of a run"),
        (["resume", "nothing"], "RUN='nothing': not the directory of a run (it has no config.yaml)"),
        (["evaluate", "nothing"], "RUN='nothing': not the directory of a run (it has no config.yaml)"),
        (["evaluate"], "rhymerl evaluate needs RUN or --config"),
        (["evaluate", "RUN", "--config=quickstart"], "rhymerl evaluate takes RUN or --config, not both"),
        (["resume", "RUN", "run_dir=other"], "rhymerl resume takes RUN or run_dir=, not both"),
        (["resume", "RUN", "trainer.max_step=3"], "did you mean trainer.max_steps?"),
        (["evaluate", "RUN", "trainer.limit_val_batches=0"], "leaves nothing to evaluate"),
    ],
)
def test_words_that_do_not_fit(words: list[str], message: str, half: Path, rhymerl: Run) -> None:
    done = rhymerl(*(word.replace("RUN", str(half)) for word in words))
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1


def test_a_run_without_a_checkpoint_cannot_be_evaluated(half: Path, rhymerl: Run) -> None:
    shutil.rmtree(half / "checkpoints")
    done = rhymerl("evaluate", str(half))
    assert (done.code, done.err) == (
        2,
        f"error: ckpt_path='auto': there is no checkpoint in run_dir='{half}'\n",
    )
