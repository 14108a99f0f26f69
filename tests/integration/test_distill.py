"""Distillation as a run: resumed exactly, without rewards, with adapters, over ranks; what is wrong with a teacher."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rhymerl.algos import Distill
from rhymerl.models.tokenizers import character_tokenizer
from rhymerl.testing import tiny_policy
from rhymerl.training.teacher import TeacherSettings
from tests.integration import training
from tests.integration.conftest import Run, assert_same, checkpoint
from tests.integration.ranked import run_ranks
from tests.integration.test_resume import assert_same_runs, killed, words_for

WIDER = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    tiny_policy(seed=5, dtype="float32", context=128, peaked=2.0, **WIDER).save(path)
    return path


@pytest.fixture
def distil(settings: list[str], teacher_dir: Path) -> list[str]:
    return [*settings, "algo=distill", f"teacher.path={teacher_dir}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [["rollout.top_p=0.8"], ["algo.over=vocabulary", "algo.reward_weight=0.5"]],
    ids=["sampled", "vocabulary"],
)
def test_killed_in_a_rollout_and_resumed_it_is_the_whole_run(more, distil, tmp_path, rhymerl: Run):
    """With sampling replayed over the tokens that truncation left, and with rewards beside the teacher."""
    whole = tmp_path / "whole"
    assert rhymerl(*words_for([*distil, *more], whole)).code == 0
    words = words_for([*distil, *more], tmp_path / "run")
    killed([*words, "drafter={_target_: tests.integration.programs.DieInRollout, call: 60}"], tmp_path)
    assert 0 < checkpoint(tmp_path / "run")["rhymerl"]["num_rollouts"] < 6
    assert rhymerl(*words, "ckpt_path=last").code == 0
    assert_same_runs(tmp_path / "run", whole)
    assert not any("teacher" in name or "reference" in name for name in checkpoint(whole)["state_dict"])


def test_a_resumed_run_keeps_its_teacher(settings, tmp_path, rhymerl: Run):
    teacher = tmp_path / "teacher"
    words = words_for([*settings, "algo=distill", f"teacher.path={teacher}"], tmp_path / "run")
    tiny_policy(seed=5, dtype="float32", context=128).save(teacher)
    assert rhymerl(*words, "trainer.max_steps=2").code == 0
    tiny_policy(seed=6, dtype="float32", context=128).save(teacher)
    done = rhymerl(*words, "ckpt_path=last")
    assert done.code == 2, done.err
    assert "its run had another teacher than that of teacher.path" in done.err
    tiny_policy(seed=5, dtype="float32", context=128).save(teacher)
    assert rhymerl(*words, "ckpt_path=last").code == 0


@pytest.mark.parametrize(
    "more",
    [[], *(pytest.param([each], marks=pytest.mark.slow) for each in ("adapter=lora", "algo.over=vocabulary"))],
    ids=str,
)
def test_without_rewards_the_policy_comes_nearer_to_its_teacher(more, distil, tmp_path, rhymerl: Run):
    """Six steps of ten prompts, of which there is nothing but the prompt."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+{i}=?\n"}) + "\n" for i in range(4)))
    words = [word for word in distil if not word.startswith(("rewards=", "task.", "trainer.max_steps"))]
    words += ["task=null", f"data.train={prompts}", "rollout.group_size=8", "trainer.max_steps=40"]
    words += ["logger=csv", "update.lr_schedule=constant", *more, f"run_dir={tmp_path / 'run'}"]
    done = rhymerl(*words)
    assert done.code == 0, done.err
    assert "same reward" not in done.err
    curve = kl_of(tmp_path / "run")
    assert len(curve) == 20
    assert sum(curve[-5:]) < 0.8 * sum(curve[:5])


def kl_of(run_dir: Path) -> list[float]:
    (path,) = run_dir.rglob("metrics.csv")
    header, *lines = (line.split(",") for line in path.read_text().splitlines())
    values = [line[header.index("kl")] for line in lines]
    return [float(value) for value in values if value]


def train(devices: int, teacher: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights of either form."""
    run = training.Run(num_steps=3, prompts_per_step=2, learning_rate=1e-2, devices=devices)
    given = {"teacher": TeacherSettings(path=teacher), "rewards": None}
    return {over: run.train(algo=Distill(over=over), **given)[0] for over in ("sampled", "vocabulary")}


def train_on_ranks(folder: str, teacher: str) -> None:
    torch.save(train(2, teacher), f"{folder}/{os.environ['LOCAL_RANK']}")


def test_two_ranks_learn_what_one_does(teacher_dir, tmp_path):
    """In float64, but for transformers' norms, of prompts without rewards."""
    expected = train(1, str(teacher_dir))
    run_ranks(2, train_on_ranks, str(tmp_path), str(teacher_dir), output=tmp_path / "output")
    one, two = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert_same(one, two)
    for over, weights in expected.items():
        for name, weight in weights.items():
            torch.testing.assert_close(one[over][name], weight, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("algo=distill", "teacher.path=null: Distill learns from a teacher; expected a model directory"),
        ("algo=distill teacher.path=./nowhere", "teacher.path='./nowhere': no such directory"),
        ("algo=distill teacher.path={other}", "it has another tokenizer than the policy ("),
        ("algo=distill teacher.path={short}", "its context is 8 tokens, a prompt and its answer may have"),
        ("algo=distill teacher.path={teacher} algo.reward_weight=-1", "algo.reward_weight=-1.0: expected at least 0"),
        ("algo=distill teacher.path={teacher} algo.kl_coef=0.1", "algo.kl_coef=0.1: expected 0 with Distill"),
        ("algo=distill teacher.path={teacher} algo.over=all", "algo.over='all'"),
        ("algo=distill teacher.path={teacher} algo.reward_weight=1 rollout.group_size=1", "rollout.group_size=1"),
        ("teacher.path={teacher}", "GRPO reads no teacher; expected null, algo=distill, or algo.kl_coef above 0"),
    ],
)
def test_what_is_wrong_costs_one_line(words, message, settings, teacher_dir, tmp_path, monkeypatch, rhymerl: Run):
    monkeypatch.chdir(tmp_path)
    tiny_policy(dtype="float32", context=8).save(tmp_path / "short")
    other = replace(tiny_policy(dtype="float32"), tokenizer=character_tokenizer("9876543210+=;#? \n"))
    other.save(tmp_path / "other")
    given = words.format(teacher=teacher_dir, other=tmp_path / "other", short=tmp_path / "short")
    done = rhymerl(*settings, f"run_dir={tmp_path / 'run'}", *given.split())
    assert done.code == 2, done.err
    assert message in done.err
    assert len([line for line in done.err.splitlines() if "error" in line.lower()]) <= 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_any_divergence_can_be_from_a_teacher(settings, teacher_dir, tmp_path, rhymerl: Run):
    """KL-regularised RL against another model; before the first update there is no divergence without one."""
    kls = []
    for name, more in (("with", [f"teacher.path={teacher_dir}"]), ("without", [])):
        words = [
            "algo.kl_coef=0.1",
            "logger=csv",
            "trainer.max_steps=1",
            "update.mini_batches=1",
            f"run_dir={tmp_path / name}",
        ]
        done = rhymerl(*settings, *words, *more)
        assert done.code == 0, done.err
        kls.append(kl_of(tmp_path / name)[0])
    assert kls[0] > 0.01
    assert abs(kls[1]) < 1e-6
