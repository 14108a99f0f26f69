"""Under `fsdp2` weights are read a tensor at a time, by each rank, and no rank ever holds the whole model."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from benchmarks.emulation.threads import ThreadBackend
from rhymerl import PromptDataModule, RhymeModule
from rhymerl.algos import GRPO, PPO
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.models import sharding
from rhymerl.models.critic import CriticSettings
from rhymerl.models.fingerprint import fingerprint
from rhymerl.models.lora import LoRA
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.models.sharding import whole
from rhymerl.rollout import RolloutSettings
from rhymerl.testing import tiny_policy
from rhymerl.training.settings import UpdateSettings
from tests.integration.ranked import run_ranks
from tests.integration.sharded import furthest, keep, kept
from tests.integration.training import PROMPTS, REWARD

KINDS = ("grpo", "ppo", "lora", "init")


def save(policy: Policy, folder: Path, *, max_shard_size: str = "20KB") -> None:
    policy.model.save_pretrained(folder, max_shard_size=max_shard_size)
    policy.tokenizer.save_pretrained(folder)


def source_for(kind: str, path: Path) -> PolicySource:
    if kind == "init":
        init = {"model_type": "starcoder2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_bias": False}
        return PolicySource(init={**init, **heads}, dtype="float64", seed=5)
    return PolicySource(str(path), dtype="float64", adapter=LoRA(rank=4) if kind == "lora" else None, seed=3)


def module_for(kind: str, path: Path, *, is_alone: bool) -> RhymeModule:
    parts: dict[str, Any] = {"algo": GRPO(kl_coef=0.1)}
    if kind == "ppo":
        parts = {"algo": PPO(), "critic": CriticSettings(learning_rate=1e-3, head_std=0.1)}
    return RhymeModule(
        source_for(kind, path),
        rollout=RolloutSettings(group_size=4, max_tokens=16, stop_token_ids=(3, 5)),
        update=UpdateSettings(learning_rate=3e-3, mini_batches=2, micro_batch_tokens=60),
        rewards=REWARD,
        backend=EmbeddedBackend() if is_alone else ThreadBackend(lambda number: EmbeddedBackend()),
        **parts,
    )


def train(
    kind: str,
    path: Path,
    *,
    size: int = 0,
    comes_late: bool = True,
    max_steps: int = 4,
    precision: str = "64-true",
) -> tuple[dict[str, torch.Tensor], str | None]:
    """Return the weights and the fingerprint of the first ones; of one process without sharding where `size` is 0."""
    trainer = L.Trainer(
        max_steps=max_steps,
        strategy="fsdp2" if size else "auto",
        accelerator="cpu",
        devices=size or 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision=precision,
    )
    with trainer.init_module(empty_init=True) if size and comes_late else nullcontext():
        module = module_for(kind, path, is_alone=size == 0)
    if size and comes_late:
        assert all(each.is_meta for name, each in module.model.named_parameters() if ".lora_" not in name)
    trainer.fit(module, PromptDataModule(PROMPTS, prompts_per_step=3))
    return {name: whole(weight).clone() for name, weight in module.state_dict().items()}, module.base_fingerprint


def train_all(folder: str, size: int) -> None:
    for kind in KINDS:
        weights, first = train(kind, Path(folder, "model"), size=size)
        keep(weights, f"{folder}/{kind}")
        Path(folder, f"{kind}.{os.environ['LOCAL_RANK']}.fingerprint").write_text(str(first))


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_that_come_late_train_as_those_of_one_process(is_tied, tmp_path):
    torch.set_num_threads(1)
    policy = tiny_policy("starcoder2", use_bias=False, context=64, peaked=2.0, tied=is_tied)
    save(policy, tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    run_ranks(2, train_all, str(tmp_path), 2, output=tmp_path / "output", timeout_s=500)
    for kind in KINDS:
        weights, first = train(kind, tmp_path / "model")
        assert furthest(kept(tmp_path / kind), weights) < 1e-9, kind
        assert furthest(kept(tmp_path / kind, 1), kept(tmp_path / kind)) == 0.0, kind
        assert (tmp_path / f"{kind}.0.fingerprint").read_text() == first, kind


def train_in_half(folder: str) -> None:
    weights, first = train("grpo", Path(folder, "model"), size=2, max_steps=2, precision="bf16-true")
    keep(weights, f"{folder}/half")
    Path(folder, "fingerprint").write_text(str(first))


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_under_bf16_true_they_are_cast_as_they_come(is_tied, tmp_path):
    save(tiny_policy("starcoder2", use_bias=False, context=64, peaked=2.0, tied=is_tied), tmp_path / "model")
    run_ranks(2, train_in_half, str(tmp_path), output=tmp_path / "output")
    weights = kept(tmp_path / "half")
    assert {each.dtype for each in weights.values()} == {torch.bfloat16}
    assert all(each.isfinite().all() for each in weights.values())
    assert torch.equal(weights["model.lm_head.weight"], weights["model.model.embed_tokens.weight"]) == is_tied
    assert furthest(kept(tmp_path / "half", 1), weights) == 0.0
    expected = source_for("grpo", tmp_path / "model").load().model
    assert (tmp_path / "fingerprint").read_text() == fingerprint(expected), "of the weights as they are on the disk"


# -- memory
# --------------------------------------------------------------------------------------------------------------


def bytes_held() -> int:
    """The bytes of all tensors that there are."""
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter) and not each.is_meta]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def measure(folder: str, comes_late: bool) -> None:
    """Write a rank's peak memory above its start whenever a group of weights is about to be sharded."""
    held: list[int] = []
    divide = sharding.fully_shard

    def watched(group: nn.Module, **settings: Any) -> nn.Module:
        held.append(bytes_held())
        return divide(group, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "fully_shard", watched)
        before = bytes_held()
        train("grpo", Path(folder, "model"), size=2, comes_late=comes_late, max_steps=2)
    Path(folder, f"{comes_late}.{os.environ['LOCAL_RANK']}").write_text(str(max(held) - before))


@pytest.mark.slow
def test_no_rank_holds_the_whole_model(tmp_path):
    """The policy and its reference: two models of which each of two ranks has half."""
    policy = tiny_policy("starcoder2", use_bias=False, hidden_size=64, num_layers=8, context=64)
    save(policy, tmp_path / "model")
    model = sum(each.nbytes for each in policy.model.parameters())
    largest = max(sum(each.nbytes for each in layer.parameters()) for layer in policy.model.model.layers)
    most = {}
    for comes_late in (False, True):
        run_ranks(2, measure, str(tmp_path), comes_late, output=tmp_path / "output")
        most[comes_late] = [int((tmp_path / f"{comes_late}.{rank}").read_text()) for rank in range(2)]
    assert min(most[False]) >= 2 * model
    assert max(most[True]) <= model + 2 * largest, (most, model, largest)
