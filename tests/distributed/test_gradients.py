"""Summed gradients: right for any buckets, wherever gradients are missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rhymerl.distributed.group import buckets, sum_gradients
from tests.integration.ranked import run_ranks

BUCKET_BYTES = [1, 100, 2**20]
EVERYBODY, RANK_0, RANK_1, NOBODY, FROZEN, HALF, TRANSPOSED, LAST = range(8)


def parameters_of(rank: int) -> list[nn.Parameter]:
    """One parameter of each kind, in an order that mixes dtypes; a gradient's values say whose it is."""
    made = [nn.Parameter(torch.zeros(3, 5, dtype=torch.float64)) for _ in range(8)]
    made[HALF] = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
    made[TRANSPOSED] = nn.Parameter(torch.zeros(5, 3, dtype=torch.float64).t())
    made[LAST] = nn.Parameter(torch.zeros((), dtype=torch.float64))
    missing = {NOBODY, RANK_1 if rank == 0 else RANK_0}
    for index, parameter in enumerate(made):
        if index not in missing:
            values = torch.arange(parameter.numel()).view(parameter.shape) + 100 * rank
            parameter.grad = torch.empty_like(parameter).copy_(values)
    made[FROZEN].requires_grad_(False)
    return made


def sum_in_process(folder: str) -> None:
    """Saves the gradients that each size of bucket leaves."""
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/collective", rank=rank, world_size=2)
    outcomes = []
    for bucket_bytes in BUCKET_BYTES:
        parameters = parameters_of(rank)
        indices = [None if parameter.grad is None else parameter.grad.data_ptr() for parameter in parameters]
        sum_gradients(parameters, bucket_bytes=bucket_bytes)
        assert all(index in (None, p.grad.data_ptr()) for index, p in zip(indices, parameters, strict=True) if index)
        outcomes.append([parameter.grad for parameter in parameters])
    sum_gradients([])
    torch.save(outcomes, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_add_up_their_gradients(tmp_path):
    run_ranks(2, sum_in_process, str(tmp_path), output=tmp_path / "output")
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    mine, other = ([parameter.grad for parameter in parameters_of(rank)] for rank in range(2))
    for gradients in (*first, *second):
        for index in (EVERYBODY, HALF, TRANSPOSED, LAST):
            assert torch.equal(gradients[index], mine[index] + other[index]), index
        assert torch.equal(gradients[RANK_0], mine[RANK_0])
        assert torch.equal(gradients[RANK_1], other[RANK_1])
        assert gradients[NOBODY] is None
    for gradients in first:
        assert torch.equal(gradients[FROZEN], mine[FROZEN])


@pytest.mark.parametrize(
    ("bucket_bytes", "expected"),
    [(1, [[0], [1], [3], [4], [2]]), (80, [[0, 1], [3], [4], [2]]), (10**6, [[0, 1, 3, 4], [2]])],
)
def test_buckets_hold_one_dtype_each_in_order(bucket_bytes, expected):
    sizes = [(4, torch.float64), (6, torch.float64), (2, torch.float32), (20, torch.float64), (1, torch.float64)]
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes]
    number = {id(parameter): i for i, parameter in enumerate(parameters)}
    assert [[number[id(p)] for p in bucket] for bucket in buckets(parameters, bucket_bytes)] == expected


def test_no_parameters_make_no_bucket():
    assert list(buckets([], 10)) == []
