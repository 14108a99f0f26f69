"""The command that made the shipped policy, at small scale."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rhymerl
from rhymerl.runs.warmstart import IGNORE, DemonstrationLoader
from rhymerl.tasks import Row, Task
from rhymerl.testing import tiny_policy
from tests.integration import programs
from tests.integration.conftest import Run, assert_same

SHIPPED = Path(rhymerl.__file__).parent / "assets" / "quickstart_policy"
LOSSES = "warmstart.callbacks=[{_target_: tests.integration.test_warmstart.KeepLosses}]"
WORDS = [
    "warmstart",
    "--config=warmstart_running_sum",
    "warmstart.num_steps=12",
    "warmstart.batch_size=8",
    "warmstart.warmup_steps=2",
    "warmstart.save_every=2",
]


class KeepLosses(L.Callback):
    losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))


class SignalAt(L.Callback):
    """Sends this process a signal before a step."""

    def __init__(self, *, step: int, number: int) -> None:
        self.step = step
        self.number = number

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.fixture(scope="module")
def whole_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole") / "policy"


@pytest.fixture
def whole(whole_dir: Path, rhymerl: Run) -> Path:
    """The policy of an uninterrupted warm start; made once."""
    if not whole_dir.exists():
        KeepLosses.losses.clear()
        done = rhymerl(*WORDS, f"out={whole_dir}", LOSSES)
        assert (done.code, done.err) == (0, "")
    return whole_dir


class Asked(Task):
    def problem(self, random_source: random.Random) -> Row:
        return {"prompt": [{"role": "user", "content": f"{random_source.randrange(100)}=?"}]}

    def demonstration(self, row: Row, random_source: random.Random) -> str:
        return row["prompt"][0]["content"][:-2]


def test_messages_go_through_the_chat_template():
    policy = tiny_policy()
    policy.tokenizer.chat_template = "{% for message in messages %}#{{ message.content }}{% endfor %};"
    batch = DemonstrationLoader(Asked(), policy, batch_size=2, num_steps=1, seed=0).batch(0)
    decode, end = policy.tokenizer.decode, policy.tokenizer.eos_token
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        answer = decode(labels[labels != IGNORE])
        assert answer.endswith(end)
        assert decode(ids[(labels == IGNORE) & (mask == 1)]) == f"#{answer.removesuffix(end)}=?;"


class Again(Asked):
    def demonstration(self, row: Row, random_source: random.Random) -> list[dict[str, str]]:
        turns = ("1", "2", "3;", "4")  # the second and third are what is said to the policy
        roles = ("assistant", "user", "user", "assistant")
        return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]


def test_of_several_turns_only_the_policys_are_imitated():
    policy = tiny_policy()
    end = policy.tokenizer.eos_token
    policy.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}#"
    batch = DemonstrationLoader(Again(), policy, batch_size=1, num_steps=1, seed=0).batch(0)
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    assert policy.tokenizer.decode(labels[labels != IGNORE]) == f"1{end}4{end}"
    assert policy.tokenizer.decode(ids).partition("#")[2] == f"1{end}\n2\n3;\n#4{end}"


def test_it_learns_and_looks_like_the_shipped_one(whole):
    assert len(KeepLosses.losses) == 12
    assert sum(KeepLosses.losses[-3:]) < 0.95 * sum(KeepLosses.losses[:3])
    one, two = (json.loads((each / "config.json").read_text()) for each in (whole, SHIPPED))
    assert {**one, "transformers_version": 0} == {**two, "transformers_version": 0}
    assert sorted(each.name for each in whole.iterdir()) == sorted(each.name for each in SHIPPED.iterdir())
    tokenizer, shipped = AutoTokenizer.from_pretrained(whole), AutoTokenizer.from_pretrained(SHIPPED)
    assert tokenizer("12+3=?\n").input_ids == shipped("12+3=?\n").input_ids
    assert AutoModelForCausalLM.from_pretrained(whole).num_parameters() < 1_000_000


@pytest.mark.slow
def test_weights_stay_in_float32_when_products_are_in_bfloat16(whole: Path, tmp_path: Path, rhymerl: Run) -> None:
    KeepLosses.losses.clear()
    done = rhymerl(*WORDS, f"out={tmp_path / 'policy'}", LOSSES, "warmstart.precision=bf16-mixed")
    assert (done.code, done.err) == (0, "")
    assert sum(KeepLosses.losses[-3:]) < 0.95 * sum(KeepLosses.losses[:3])
    one, two = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (tmp_path / "policy", whole))
    name = "model.layers.0.mlp.up_proj.weight"
    assert one[name].dtype == torch.float32
    assert 0 < (one[name] - two[name]).abs().max() < 0.05


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_interrupted_and_resumed(number, code, whole, tmp_path, rhymerl):
    """Killed in step 5: the state of step 4 is there, so step 5 is repeated."""
    out = tmp_path / "policy"
    sender = f"{{_target_: tests.integration.test_warmstart.SignalAt, step: 5, number: {int(number)}}}"
    process = programs.start([*WORDS, f"out={out}", f"warmstart.callbacks=[{sender}]"], tmp_path / "output")
    process.join(600)
    assert process.exitcode == code, (tmp_path / "output").read_text()
    assert [each.name for each in out.iterdir()] == ["warmstart.ckpt"]
    other = rhymerl(*WORDS, f"out={out}", "warmstart.batch_size=9")
    assert (other.code, "another batch_size (8, now 9)" in other.err) == (2, True)
    assert rhymerl(*WORDS, f"out={out}").code == 0
    one, two = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (out, whole))
    assert_same(dict(one), dict(two))
    assert not (out / "warmstart.ckpt").exists()
