"""Sharded ranks whose answers come from SGLang servers: `trainer.strategy=fsdp2` with `backend.url`."""

from __future__ import annotations

import json
import os
import pickle
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from rhymerl.backends.remote import weights
from rhymerl.backends.remote.delivery import Delivery
from rhymerl.backends.remote.proof import prove_server
from rhymerl.backends.remote.weight_group import WeightGroup
from rhymerl.cli import main
from rhymerl.models.copies import copy_weights
from rhymerl.models.policy import PolicySource
from rhymerl.runs.export import export
from rhymerl.testing import tiny_policy
from tests.integration.ranked import run_ranks
from tests.sglang.engines import Answers, embedded, equal, largest_difference
from tests.sglang.test_fit import on_sglang
from tests.sglang.test_servers import served

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("cpu_engine")]

STEPS, ANSWERS = 3, 32
BUCKET_BYTES = 2**14  # of weights that are some 70 KB


class KeepAnswers(L.Callback):
    """Writes the answers of each step, with their requests, to a file in a folder."""

    def __init__(self, *, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *rest: Any) -> None:
        if trainer.is_global_zero:
            completions = [sample.completion for sample in pl_module.last_rollout.samples]
            (self.folder / f"answers.{pl_module.num_rollouts - 1}").write_bytes(pickle.dumps(completions))


def note_deliveries(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Note size and number of tensors of each weights message; prove each server's log-probs after each load."""
    send, load = WeightGroup._send, Delivery.load

    def noted_send(group: WeightGroup, bucket: Any, dtype: torch.dtype, version: int) -> None:
        size = sum(tensor.nbytes for _, tensor in bucket)
        with (folder / "messages").open("a") as file:
            file.write(json.dumps([group.engine.url, version, len(bucket), size]) + "\n")
        send(group, bucket, dtype, version)

    def proven_load(delivery: Delivery, named: Any, version: int) -> None:
        load(delivery, named, version)
        policy = deepcopy(delivery.policy)  # which has the first weights
        copy_weights(policy.model, named)
        engine = delivery.engine
        prove_server(engine, policy, delivery.dtype)
        with (folder / "proven").open("a") as file:
            file.write(json.dumps([engine.url, version]) + "\n")

    patch.setattr(weights, "_BUCKET_BYTES", BUCKET_BYTES)
    patch.setattr(WeightGroup, "_send", noted_send)
    patch.setattr(Delivery, "load", proven_load)


def train(folder: str, words: list[str]) -> None:
    """One of the ranks of `rhymerl fit`."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["LOCAL_RANK"] == "0":
            note_deliveries(patch, Path(folder))
        assert main(words) == 0


def words_of(model: Path, run_dir: Path, urls: list[str]) -> list[str]:
    """Return the command line of the run, which saves the policy of each step."""
    return [
        "fit",
        "--config=quickstart",
        f"model.path={model}",
        f"run_dir={run_dir}",
        "deterministic=false",
        "task.difficulty=3",
        f"task.train_size={ANSWERS // 8}",
        f"data.prompts_per_step={ANSWERS // 8}",
        "rollout.group_size=8",
        "rollout.max_tokens=24",
        "update.learning_rate=1e-2",
        "rewards={digits: tests.integration.rewards.digits}",
        "checkpoint.every_n_steps=1",
        f"checkpoint.keep={STEPS}",
        "trainer.limit_val_batches=0",
        f"trainer.max_steps={STEPS}",
        f"trainer.callbacks=[{{_target_: tests.sglang.test_sharded.KeepAnswers, folder: {run_dir.parent}}}]",
        "trainer.strategy=fsdp2",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "backend=sglang",
        f"backend.url=[{','.join(urls)}]",
        "backend.nodes=7",
        "backend.max_running=16",
        "backend.weights=distributed",
    ]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def kept_answers(folder: Path, step: int) -> Answers:
    completions = pickle.loads((folder / f"answers.{step}").read_bytes())
    return {each.request.id: each for each in completions}


def test_two_sharded_ranks_train_with_the_answers_of_two_servers(tmp_path, capsys):
    model, run_dir = tmp_path / "model", tmp_path / "run"
    tiny_policy(dtype="float32", context=128, peaked=2.0).save(model)
    assert main(["sglang-args", f"model.path={model}", f"out={tmp_path}", "backend.max_running=16", *on_sglang()]) == 0
    line = capsys.readouterr().out.strip().splitlines()[-1]
    with ExitStack() as stack:
        urls = [stack.enter_context(served(line, tmp_path / f"server.{name}")) for name in "ab"]
        run_ranks(2, train, str(tmp_path), words_of(model, run_dir, urls), output=tmp_path / "output", timeout_s=600)

    for step in range(STEPS):
        path = export(run_dir / "checkpoints" / f"step={step}.ckpt", tmp_path / f"policy.{step}") if step else model
        answers = kept_answers(tmp_path, step)
        expected = embedded(
            PolicySource(str(path), dtype="float32").load(), [each.request for each in answers.values()]
        )
        print(step, equal(answers, expected), largest_difference(answers, expected))
        assert len(answers) == ANSWERS
        assert all((each.output.policy_versions == step).all() for each in answers.values())
        assert equal(answers, expected) >= 0.98
        assert largest_difference(answers, expected) < 1e-3
    loads = [[url, step] for step in range(STEPS) for url in sorted(urls)]
    assert sorted(lines(tmp_path / "proven"), key=lambda each: (each[1], each[0])) == loads
    messages = lines(tmp_path / "messages")
    assert max(size for *_, size in messages) <= BUCKET_BYTES
    for url, version in loads:
        sizes = [size for *to, _, size in messages if to == [url, version]]
        assert len(sizes) > 3
        assert sum(sizes) == sum(each.nbytes for each in PolicySource(str(model)).load().model.parameters())
