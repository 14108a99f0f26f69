"""A run that trains adapters: resumed exactly, and exported as a plain model that answers as the run's own does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rhymerl.models.lora import is_adapted
from tests.integration.conftest import Run, assert_same, checkpoint
from tests.integration.ranked import run_ranks
from tests.integration.test_ranks_command import main
from tests.models.windowed import InDouble

SWITCHES = ["adapter=lora", "adapter.rank=4", "adapter.dropout=0.1", "algo.kl_coef=0.05", "update.learning_rate=1e-2"]


@pytest.fixture
def words(settings: list[str]) -> list[str]:
    return [*settings, *SWITCHES, "checkpoint.keep=6"]


def test_a_run_is_resumed_and_exported(words: list[str], tmp_path: Path, rhymerl: Run):
    whole, later, exported = tmp_path / "whole", tmp_path / "later", tmp_path / "exported"
    done = rhymerl(*words, f"run_dir={whole}")
    assert done.code == 0, done.err
    done = rhymerl(*words, f"run_dir={later}", f"ckpt_path={whole / 'checkpoints' / 'step=2.ckpt'}")
    assert done.code == 0, done.err
    one, two = checkpoint(whole), checkpoint(later)
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(one[part], two[part], part)
    early = checkpoint(whole, "step=2")["state_dict"]
    moved = {name for name, tensor in one["state_dict"].items() if not tensor.equal(early[name])}
    assert moved == {name for name in early if "lora_" in name}

    assert rhymerl("export", str(whole), str(exported)).code == 0
    assert not is_adapted(AutoModelForCausalLM.from_pretrained(exported))
    of_run = rhymerl("evaluate", *words[1:], f"ckpt_path={whole / 'checkpoints' / 'last.ckpt'}", "--json")
    plain = [word for word in words[1:] if "adapter" not in word and "model.path" not in word]
    of_export = rhymerl("evaluate", *plain, f"model.path={exported}", "--json")
    one, two = (json.loads(done.out) for done in (of_run, of_export))
    assert one["eval/reward"] == pytest.approx(two["eval/reward"])
    assert one["eval/mean_length"] == pytest.approx(two["eval/mean_length"])


def test_going_on_without_the_adapters_is_refused(words: list[str], tmp_path: Path, rhymerl: Run):
    assert rhymerl(*words, "trainer.max_steps=2", f"run_dir={tmp_path / 'one'}").code == 0
    plain = [word for word in words if "adapter" not in word]
    done = rhymerl(*plain, f"run_dir={tmp_path / 'two'}", f"ckpt_path={tmp_path / 'one' / 'checkpoints' / 'last.ckpt'}")
    assert done.code == 2
    assert "of another model than model.path or model.init, or with another adapter" in done.err


def main_in_double(words: list[str]) -> None:
    with InDouble():  # norms compute in float32, where a last bit of float64 may round the other way
        main(words)


@pytest.mark.slow
def test_two_ranks_train_the_adapters_of_one(words: list[str], tmp_path: Path):
    more = ["adapter.dropout=0", "trainer.precision=64-true", "trainer.max_steps=6", "trainer.accelerator=cpu"]
    words = [word for word in words if not word.startswith("adapter.dropout")] + more
    run_ranks(1, main_in_double, [*words, f"run_dir={tmp_path / 'one'}"], output=tmp_path / "output")
    ranks = ["trainer.devices=2", "trainer.strategy=ddp"]
    run_ranks(2, main_in_double, [*words, *ranks, f"run_dir={tmp_path / 'two'}"], output=tmp_path / "output")
    one, two = (checkpoint(tmp_path / name)["state_dict"] for name in ("one", "two"))
    assert list(one) == list(two)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=1e-9, rtol=0)
