"""The update with sharded weights: the steps, weights and metrics of one rank that holds them whole."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from rhymerl.algos import GRPO
from rhymerl.distributed.group import Group
from rhymerl.models.critic import CriticSettings
from rhymerl.models.logprobs import policy_output, token_batch
from rhymerl.models.sharding import shard, whole
from tests.integration.ranked import run_ranks
from tests.training.test_update_ranks import ragged
from tests.training.updates import ActorCritic, first_policy, forgiving_grpo, norm_in_double, run_update

SMALL = {
    "micro_batch_tokens": 60,
    "chunk_tokens": 7,
}  # so that ranks have different numbers of micro-batches and chunks
CRITIC = {"algorithm": ActorCritic, "steps": 2, "mini_batches": 2, "epochs": 2}


def critic(**settings: Any) -> dict[str, Any]:
    return {**CRITIC, "critic": CriticSettings(head_std=0.3, learning_rate=1e-2, **settings)}


SHARED = {"shares_prefixes": True, "mini_batches": 2}  # compared with one rank that computes each answer by itself
CASES: dict[str, dict[str, Any]] = {
    "plain": {"steps": 2},
    "kl": {"algorithm": functools.partial(forgiving_grpo, kl_coef=0.3), "steps": 2, "mini_batches": 3},
    "clipped": {"max_grad_norm": 1e-3},
    "activation_checkpointing": {"activation_checkpointing": True},
    "ranks_without_samples": {"mini_batches": 8},  # two samples each
    "weight_decay": {"algorithm": GRPO, "weight_decay": 0.1, "steps": 2},
    "own_critic": critic(),
    "own_critic_warms_up": critic(warmup_steps=1),
    "shared_critic": critic(shared=True),
    "shared_critic_warms_up": critic(shared=True, warmup_steps=1),
    "shared_beginnings": {"steps": 2, **SHARED},
    "shared_beginnings_of_a_critic": {**critic(), **SHARED},
}
MESHES = {2: {"fsdp": (2,)}, 4: {"fsdp": (4,), "hsdp": (2, 2)}}


def update(case: str, **settings: Any) -> tuple[nn.ModuleDict, dict[str, float]]:
    samples = ragged(16, alike="shares_prefixes" in CASES[case])
    with patch.object(Qwen2RMSNorm, "forward", norm_in_double):
        return run_update(samples, **{**CASES[case], **settings})


def update_all(size: int, folder: str) -> None:
    """Each case on each mesh, and what came of it to a file."""
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    for name, shape in MESHES[size].items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for case in CASES:
            ranks = Group()
            trained, metrics = update(case, ranks=ranks, mesh=mesh, **SMALL)
            weights = {key: whole(weight) for key, weight in trained.state_dict().items()}
            held = sum(each.to_local().numel() for each in trained["model"].parameters())
            torch.save((weights, metrics, held), f"{folder}/{name}.{case}.{rank}")
            ranks.close()
        torch.save(mixed_gradients(mesh), f"{folder}/{name}.mixed.{rank}")
    dist.destroy_process_group()


def mixed_gradients(mesh: DeviceMesh | None) -> dict[str, torch.Tensor]:
    """The gradients of a float32 model that is computed with in bfloat16, over all samples on each rank."""
    model = copy.deepcopy(first_policy().model).float()
    if mesh is not None:
        shard(model, mesh, compute_dtype=torch.bfloat16)
    policy_output(model, token_batch(ragged(16), "cpu"), temperature=1.0).logprobs.sum().backward()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def updated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(request.param, update_all, request.param, str(folder), output=folder / "output")
    return folder


@functools.cache
def alone(case: str) -> tuple[dict[str, torch.Tensor], dict[str, float], int]:
    trained, metrics = update(case, shares_prefixes=False)
    held = sum(each.numel() for each in trained["model"].parameters())
    return trained.state_dict(), metrics, held


def cases(size: int) -> list[Any]:
    marks = [pytest.mark.slow] if size > 2 else []
    return [pytest.param(size, mesh, case, marks=marks) for mesh in MESHES[size] for case in CASES]


@pytest.mark.parametrize(("updated", "mesh", "case"), cases(2) + cases(4), indirect=["updated"], scope="module")
def test_sharded_ranks_take_the_steps_of_one(updated, mesh, case):
    weights, metrics, held = alone(case)
    of_ranks = [torch.load(path) for path in sorted(updated.glob(f"{mesh}.{case}.*"))]
    for mine, mine_metrics, mine_held in of_ranks:
        assert mine.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(mine[name], weight, atol=1e-10, rtol=0)
            assert torch.equal(mine[name], of_ranks[0][0][name]), "all ranks have the same bits"
        assert mine_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-7)
        assert mine_metrics == of_ranks[0][1]
        assert mine_held < 0.6 * held


@pytest.mark.parametrize("updated", [2], indirect=True, scope="module")
def test_layers_in_bfloat16_leave_weights_and_sums_in_float32(updated):
    expected, found = mixed_gradients(None), torch.load(updated / "fsdp.mixed.0")
    for name, gradient in expected.items():
        assert found[name].dtype == torch.float32
        both = gradient.flatten(), found[name].flatten() / 2  # of two ranks
        assert torch.nn.functional.cosine_similarity(*both, dim=0) > 0.98, name
        assert 0.9 < both[1].norm() / both[0].norm() < 1.1, name
