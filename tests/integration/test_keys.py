"""Keys that a config takes from the environment are in nothing that a run writes, nor in what is published of it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from rhymerl.training.module import RhymeModule
from tests.integration.conftest import Run

KEY = "sk-7d1e02f3"
RUN = """
defaults: [quickstart, _self_]
seed: ${oc.decode:${oc.env:RHYME_SEED}}
trainer: {max_steps: "${oc.env:RHYME_STEPS}", enable_progress_bar: false}
checkpoint: {every_n_steps: 1}
task: {train_size: 4, validation_size: 2}
data: {prompts_per_step: 2}
rollout: {group_size: 2, max_tokens: 8}
rewards:
  judge:
    function: keyed_judge.judge
    arguments: {key: "${oc.env:JUDGE_KEY}", header: "Bearer ${rewards.judge.arguments.key}", more: [["${oc.env:JUDGE_KEY}"]]}
"""
JUDGE = f"""
def judge(completion, *, key, header, more):
    assert (key, header, more) == ({KEY!r}, "Bearer {KEY}", [[{KEY!r}]])
    return 1.0
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, value in {"JUDGE_KEY": KEY, "RHYME_SEED": "3", "RHYME_STEPS": "2"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "keyed_judge.py").write_text(JUDGE)
    path = tmp_path / "keyed.yaml"
    path.write_text(RUN)
    return path


def having_the_key(folder: Path) -> list[str]:
    """Return the files in the folder with the key, but for the judge, who knows it."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("keyed_judge.")]
    assert files
    return [str(path) for path in files if KEY.encode() in content(path)]


def content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def test_keys_are_read_where_a_part_is_built_and_written_nowhere(config, rhymerl: Run, monkeypatch):
    run = config.parent / "run"
    for words in (["--print-config"], ["--print-config", "--json"]):
        assert KEY not in rhymerl("fit", "--config", str(config), *words).out
    done = rhymerl("fit", "--config", str(config), f"run_dir={run}")
    assert done.code == 0, done.err
    assert KEY not in done.out + done.err
    assert rhymerl("report", str(run)).code == 0
    assert rhymerl("export", str(run), str(config.parent / "exported")).code == 0
    assert not having_the_key(run)
    assert not having_the_key(config.parent / "exported")
    assert "`judge` (`keyed_judge.judge`)" in (config.parent / "exported" / "README.md").read_text()

    assert rhymerl("resume", str(run), "trainer.max_steps=3").code == 0
    assert not having_the_key(run)
    rewards = RhymeModule.load_from_checkpoint(run / "checkpoints" / "last.ckpt").rewards
    assert rewards["judge"]["arguments"] == {"key": KEY, "header": f"Bearer {KEY}", "more": [[KEY]]}

    monkeypatch.delenv("JUDGE_KEY")
    gone = rhymerl("resume", str(run), "trainer.max_steps=4")
    assert gone.code == 2
    assert "rewards.judge.arguments.key='${oc.env:JUDGE_KEY}': " in gone.err


def test_forks_and_evaluations_write_no_key_either(config, rhymerl: Run, monkeypatch):
    run, fork = config.parent / "run", config.parent / "fork"
    assert rhymerl("fit", "--config", str(config), f"run_dir={run}", "trainer.max_steps=1").code == 0
    for words in (
        ["evaluate", str(run)],
        ["evaluate", str(run), "--json", "ckpt_path=last"],
        ["fork", f"{run}@1", f"run_dir={fork}", "trainer.max_steps=2", "record_rollouts=true"],
        ["fork", f"{run}@0", f"run_dir={fork}0", "trainer.max_steps=1"],
        ["evaluate", str(fork)],
    ):
        done = rhymerl(*words)
        assert done.code == 0, done.err
        assert KEY not in done.out + done.err
    assert not having_the_key(config.parent)

    monkeypatch.delenv("JUDGE_KEY")
    for words in (["evaluate", str(run)], ["fork", str(run), f"run_dir={fork}1"]):
        done = rhymerl(*words)
        assert done.code == 2
        assert "rewards.judge.arguments.key='${oc.env:JUDGE_KEY}': " in done.err
