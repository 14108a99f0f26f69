"""Sharded weights are whole on rank 0 when their turn comes, gathered some rows at a time."""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from rhymerl.models.lora import LoRA, LowRank, with_adapters
from rhymerl.models.sharding import GatheredTensors, shard
from rhymerl.testing import tiny_policy
from tests.integration.ranked import run_ranks

BLOCK_BYTES = 1500


def model_for(kind: str) -> torch.nn.Module:
    model = tiny_policy(hidden_size=32, dtype="float32", tied=kind == "tied").model
    if kind == "adapted":
        LoRA(rank=2).put_on(model, seed=1)
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    return model


def gather(folder: str, kind: str, shape: tuple[int, ...], block_bytes: int) -> None:
    """Write what rank 0 gets, and the most bytes that were on their way at a time."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = model_for(kind)
    shard(model, mesh)
    begun: list[weakref.ref[torch.Tensor]] = []
    most: list[int] = []
    start = dist.gather

    def watched(mine, parts, **settings):
        time.sleep(0.02)  # for the threads of gloo, which hold what they have sent for a moment
        begun.extend(map(weakref.ref, parts or []))
        most.append(sum(part.nbytes for each in begun if (part := each()) is not None))
        return start(mine, parts, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "gather", watched)
        found = GatheredTensors(with_adapters(model, model.named_parameters()), block_bytes=block_bytes)
        if rank == 0:
            torch.save(({name: each.clone() for name, each in found}, max(most)), f"{folder}/found")
        else:
            found.take_part()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "shape", "block_bytes"),
    [
        ("plain", (3,), BLOCK_BYTES),
        ("tied", (2,), BLOCK_BYTES),
        ("adapted", (3,), BLOCK_BYTES),
        ("plain", (2, 2), BLOCK_BYTES),
        ("plain", (3,), 300),  # less than a row of each rank
    ],
)
def test_rank_0_gets_each_tensor_in_blocks(kind, shape, block_bytes, tmp_path):
    size = torch.Size(shape).numel()
    run_ranks(size, gather, str(tmp_path), kind, shape, block_bytes, output=tmp_path / "output")
    found, most = torch.load(Path(tmp_path) / "found")
    model = model_for(kind)
    expected = dict(with_adapters(model, model.named_parameters()))
    assert list(found) == list(expected)
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, atol=1e-6 if kind == "adapted" else 0, rtol=0)
    assert max(each.nbytes for each in expected.values()) > 4 * BLOCK_BYTES
    assert most <= 2 * block_bytes


def add_adapters(folder: str) -> None:
    """Write what a rank adds to its rows of a matrix, and what was sent for it."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    weight, a, b = (distribute_tensor(each, mesh, [Shard(0)]) for each in matrices())
    with CommDebugMode() as sent:
        found = LowRank(a=a, b=b, scaling=2.0).added_to(weight)
    torch.save((found.to_local(), sent.get_total_counts()), f"{folder}/found{rank}")
    dist.destroy_process_group()


def matrices() -> list[torch.Tensor]:
    """A matrix and its adapter, of which it is cheaper to send b's parts than the whole of a."""
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in ((1024, 2048), (8, 2048), (1024, 8))]


def test_a_sharded_adapter_is_added_by_rows(tmp_path):
    """Only a is made whole: no rank multiplies the whole matrix, nor sends any of it."""
    run_ranks(2, add_adapters, str(tmp_path), output=tmp_path / "output")
    weight, a, b = matrices()
    parts, sent = zip(*(torch.load(tmp_path / f"found{rank}") for rank in range(2)), strict=True)
    torch.testing.assert_close(torch.cat(parts), weight + 2 * b @ a)
    assert sent == (1, 1)
