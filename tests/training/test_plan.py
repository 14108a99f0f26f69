"""What a rank is said to hold and to send, against the tensors that are there and the collectives that are called."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rhymerl.algos import GRPO
from rhymerl.distributed.group import Group
from rhymerl.memory.base import Layout
from rhymerl.memory.outline import outline, total_bytes
from rhymerl.memory.parts import rank_memory
from rhymerl.memory.traffic import Traffic, num_backwards, num_forwards, traffic
from rhymerl.training.memory import setup_of
from rhymerl.training.settings import UpdateSettings
from tests.integration.ranked import run_ranks
from tests.integration.sharded import train
from tests.training.setups import setup_for
from tests.training.test_update_ranks import ragged
from tests.training.updates import first_policy, run_update

STRATEGIES = {1: ("alone",), 2: ("ddp", "fsdp2"), 3: ("fsdp2",)}
KINDS = ("grpo", "ppo", "lora")  # with a reference, with a critic of its own, with adapters


def held_bytes(tensors: Iterable[Tensor | None]) -> int:
    """The bytes of their storages here, each once."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors if each is not None]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}.values())


class Weigh(L.Callback):
    """What is there when the optimizer has stepped, and what was said to be."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.optimizers[0].register_step_post_hook(lambda optimizer, *_: self.weigh(trainer, pl_module, optimizer))

    def weigh(self, trainer: Any, module: Any, optimizer: Any) -> None:
        models = [module.model, *([module.critic] if module.critic is not None else [])]
        trained = [each for model in models for each in model.parameters()]
        reference = module.reference if module.reference is not module.model else None
        self.found = {
            "weights": held_bytes(module.model.parameters()),
            "critic": held_bytes(module.critic.parameters()) if module.critic is not None else 0,
            "reference": held_bytes(reference.parameters()) if reference is not None else 0,
            "gradients": held_bytes(each.grad for each in trained),
            "moments": held_bytes(
                each for state in optimizer.state.values() for name, each in state.items() if name != "step"
            ),
        }
        parts = rank_memory(setup_of(module, trainer, trainer.datamodule)).parts
        self.said = {name: parts[name] for name in self.found}


def weigh_all(folder: str, size: int) -> None:
    for strategy in STRATEGIES[size]:
        for kind in KINDS:
            weigh = Weigh()
            train(strategy, kind, size=size, num_steps=1, callbacks=[weigh])
            path = Path(f"{folder}/{strategy}.{kind}.{os.environ.get('LOCAL_RANK', 0)}.json")
            path.write_text(json.dumps([weigh.said, weigh.found]))


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 3))])
def test_a_rank_holds_what_is_said(size, tmp_path):
    """32 rows among 3 ranks are 11, 11 and 10: not a third."""
    run_ranks(size, weigh_all, str(tmp_path), size, output=tmp_path / "output", timeout_s=350)
    for strategy in STRATEGIES[size]:
        for kind in KINDS:
            pairs = [json.loads(path.read_text()) for path in tmp_path.glob(f"{strategy}.{kind}.*.json")]
            assert len(pairs) == size
            said = pairs[0][0]
            most = {name: max(found[name] for _, found in pairs) for name in said}
            assert most == said, (strategy, kind)
            assert said["moments"] == 2 * said["gradients"] > 0
            assert (said["critic"] > 0, said["reference"] > 0) == (kind == "ppo", kind == "grpo")
            if kind == "lora":
                assert said["gradients"] < said["weights"] / 2


# -- what is sent
# --------------------------------------------------------------------------------------------------------


# As versions of torch call them.
GATHERS = ("all_gather_single", "all_gather_into_tensor")
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")


class Count:
    """The bytes that this rank sends by rings in collectives of tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gathered = self.summed = 0
        self._is_within = False
        for name in (*GATHERS, *SCATTERS, "all_reduce"):
            if hasattr(dist, name):
                monkeypatch.setattr(dist, name, self._counting(name, getattr(dist, name)))

    def _counting(self, name: str, collective: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if self._is_within:
                return collective(*arguments, **named)
            self._add(name, [each for each in (*arguments, *named.values()) if torch.is_tensor(each)], named)
            self._is_within = True
            try:
                return collective(*arguments, **named)
            finally:
                self._is_within = False

        return call

    def _add(self, name: str, tensors: list[Tensor], named: dict[str, Any]) -> None:
        ranks = (named.get("group") or dist.group.WORLD).size()
        sent = max(each.nbytes for each in tensors) * (ranks - 1) // ranks
        if name in GATHERS:
            self.gathered += sent
        elif name in SCATTERS:
            self.summed += sent
        elif max(each.numel() for each in tensors) > 100:  # no counters
            self.summed += 2 * sent


SENT = {2: {"ddp": None, "fsdp2": (2,)}, 3: {"fsdp2": (3,)}, 4: {"hsdp": (2, 2)}}


def count_all(folder: str, size: int) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    for name, shape in SENT[size].items():
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :]) if shape is not None else None
        ranks = Group()
        with pytest.MonkeyPatch.context() as patch:
            count = Count(patch)
            run_update(ragged(16), algorithm=GRPO, ranks=ranks, mesh=mesh)
        Path(f"{folder}/{name}.{rank}.json").write_text(json.dumps([count.gathered, count.summed]))
        ranks.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_sends_what_is_said(size, tmp_path):
    run_ranks(size, count_all, str(tmp_path), size, output=tmp_path / "output")
    layouts = {
        "ddp": Layout(num_ranks=size, num_replicas=size),
        "fsdp2": Layout(num_ranks=size, is_sharded=True),
        "hsdp": Layout(num_ranks=size, num_replicas=2, is_sharded=True),
    }
    for path in tmp_path.glob("*.0.json"):
        name = path.name.partition(".")[0]
        said = traffic(setup_for(first_policy().model, layout=layouts[name]))
        gathered, summed = json.loads(path.read_text())
        # Tensors of an odd number of rows are padded; buckets carry a few counters.
        assert gathered == pytest.approx(said.gathers, rel=0.01), name
        assert summed == pytest.approx(said.gradients, rel=0.01), name
        assert (said.gathers == 0) == (name == "ddp")
        assert said.gradients > 0


def test_one_rank_sends_nothing():
    for layout in (Layout(), Layout(is_sharded=True)):
        sent = traffic(setup_for(first_policy().model, layout=layout))
        assert sent == Traffic(gathers=0, gradients=0, weights=0)


def test_the_table_is_that_of_the_model():
    model = first_policy().model
    found = outline(model, reference=None, critic=None)
    assert total_bytes(found.policy) == sum(each.nbytes for each in model.parameters())
    assert found.reference == found.critic == ()


def test_a_backward_has_whole_samples():
    """Eight answers of 24 tokens: one in each backward of 32, though all of them are six times as many."""
    setup = setup_for(
        first_policy().model, longest=24, step_tokens=8 * 24, update=UpdateSettings(micro_batch_tokens=32)
    )
    assert num_backwards(setup) == num_forwards(setup) == 8
    assert num_backwards(replace(setup, mini_batches=2, epochs=3)) == 3 * 2 * 4
