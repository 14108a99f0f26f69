"""`rhymerl export`: the policy, the whole policy, and nothing but where it belongs."""

from __future__ import annotations

import json
import re
import shutil
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rhymerl.callbacks import AtomicCheckpointIO
from rhymerl.errors import ConfigError
from rhymerl.models.exported import restore
from tests.integration.conftest import Run, assert_same, checkpoint


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "run"


@pytest.fixture
def trained(run_dir: Path, settings: list[str], rhymerl: Run) -> Path:
    """A run of one step; made once."""
    if not run_dir.exists():
        assert rhymerl(*settings, "trainer.max_steps=2", f"run_dir={run_dir}").code == 0
    return run_dir


def crafted(trained: Path, path: Path, **files: Any) -> Path:
    """A checkpoint with other policy files, as anybody can make one."""
    saved = checkpoint(trained)
    saved["rhymerl"]["policy_files"] |= {name.replace("__", "/"): content for name, content in files.items()}
    AtomicCheckpointIO().save_checkpoint(saved, path)
    return path


def test_the_model_card_says_how_the_policy_came_about(trained: Path, tmp_path: Path, rhymerl: Run) -> None:
    assert rhymerl("export", str(trained), str(tmp_path / "out")).code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    summary = json.loads((trained / "summary.json").read_text())
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "after 1 rollout steps of `GRPO`" in card
    (task,) = re.findall(r"^- task: `RunningSum` \((.*)\)$", card, re.MULTILINE)
    assert {"`difficulty=3`", "`train_size=10`"} <= set(task.split(", "))
    assert "- rewards: `digits` (`tests.integration.rewards.digits`)" in card
    assert f"| `eval_reward_after` | {summary['eval_reward_after']:.4g} |" in card
    assert "| step | reward |" in card
    assert f"| 1 | {summary['reward_first']:.4g} |" in card
    assert "learning_rate: 0.01" in card
    assert str(trained.parent) not in card
    assert (tmp_path / "out" / "reward.png").exists() == ("![Reward by step](reward.png)" in card)


def test_a_checkpoint_alone_has_a_model_card_without_results(trained: Path, tmp_path: Path, rhymerl: Run) -> None:
    path = shutil.copy(trained / "checkpoints" / "last.ckpt", tmp_path / "alone.ckpt")
    assert rhymerl("export", str(path), str(tmp_path / "out")).code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "## Settings" in card
    assert "## Results" not in card


EVIL = b64encode(b"evil").decode()


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/EVIL", "..", ".", "", "a/..", "nul\0byte", "./../evil"])
def test_a_name_that_leads_elsewhere_is_refused_before_anything_is_written(
    name: str, trained: Path, tmp_path: Path, rhymerl: Run
) -> None:
    target = tmp_path / "deep" / "evil"
    name = name.replace("/EVIL", str(target))
    path = crafted(trained, tmp_path / "crafted.ckpt", **{name: EVIL})
    before = sorted(tmp_path.rglob("*"))
    done = rhymerl("export", str(path), str(tmp_path / "out"))
    assert done.code == 2
    assert "leads out of the directory that it belongs to" in done.err
    assert done.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "name",
    [
        "link/evil",
        "modeling_evil.py",
        "evil.json.py",
        "evil.PY",
        ".py",
        "pytorch_model.bin",
        "evil.pkl",
        "evil.json.pkl",
        "evil.pt",
        "evil.so",
    ],
)
def test_a_file_that_is_code_or_a_pickle_is_refused_before_anything_is_written(
    name: str, trained: Path, tmp_path: Path, rhymerl: Run
) -> None:
    path = crafted(trained, tmp_path / "crafted.ckpt", **{name: EVIL})
    done = rhymerl("export", str(path), str(tmp_path / "out"))
    assert done.code == 2
    assert f"policy file {name!r}: no file of a config or a tokenizer (.json, " in done.err
    assert done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_directory_is_not_followed(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "link").symlink_to(tmp_path / "elsewhere")
    saved = checkpoint(trained)
    files = {**saved["rhymerl"]["policy_files"], "link/evil": EVIL}
    with pytest.raises(ConfigError, match="leads out of the directory"):
        restore(files, {}, tmp_path / "out", read=dict)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["link"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_is_there_stays(trained: Path, model_dir: Path, tmp_path: Path, rhymerl: Run) -> None:
    """The base model is one word away on the command line."""
    before = {path.name: path.read_bytes() for path in model_dir.iterdir()}
    done = rhymerl("export", str(trained), str(model_dir))
    assert done.code == 2
    assert (
        done.err
        == f"error: OUT='{model_dir}': holds files already (config.json); give a new directory, or an empty one\n"
    )
    assert {path.name: path.read_bytes() for path in model_dir.iterdir()} == before
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    for out in ("new/deeper", "empty"):
        assert rhymerl("export", str(trained), str(tmp_path / out)).code == 0
        model = AutoModelForCausalLM.from_pretrained(tmp_path / out)
        weights = {name.removeprefix("model."): each for name, each in checkpoint(trained)["state_dict"].items()}
        assert_same(dict(model.state_dict()), weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link", "new"]
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "new" / "deeper").stat().st_mode


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config.json": "not base64"}, "base64"),
        ({"config.json": b64encode(b"{").decode()}, "not a valid JSON file"),
        ({"config.json": 3}, ""),
        ({"config.json__below": EVIL}, "config.json"),
        ({"config.json": b64encode(b'{"model_type": "mine", "auto_map": {"AutoConfig": "evil.Evil"}}').decode()}, ""),
    ],
    ids=str,
)
def test_files_that_are_no_policy_are_one_line_and_leave_nothing(
    files: dict[str, Any], reason: str, trained: Path, tmp_path: Path, rhymerl: Run
) -> None:
    path = crafted(trained, tmp_path / "crafted.ckpt", **files)
    done = rhymerl("export", str(path), str(tmp_path / "out"))
    assert done.code == 2
    assert done.err.startswith(f"error: RUN='{path}': its policy cannot be written to OUT='{tmp_path / 'out'}': ")
    assert reason in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_one_line(trained: Path, tmp_path: Path, rhymerl: Run) -> None:
    saved = checkpoint(trained)
    del saved["state_dict"]["model.model.norm.weight"]
    saved["state_dict"]["model.more"] = torch.zeros(3)
    AtomicCheckpointIO().save_checkpoint(saved, tmp_path / "crafted.ckpt")
    done = rhymerl("export", str(tmp_path / "crafted.ckpt"), str(tmp_path / "out"))
    assert done.code == 2
    assert "model.norm.weight" in done.err
    assert done.err.count("\n") == 1
