"""Two ranks of a trainer, each with an SGLang engine of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rhymerl.drafters import HistoryTreeDrafter, RunAheadDrafter
from rhymerl.testing import make_requests, tiny_policy
from tests.sglang.engines import answered, embedded, equal, sglang, started
from tests.sglang.test_life import moved

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("cpu_engine")]

SIZE = 2


def live(rank: int, folder: str) -> None:
    """Answer a rank's own requests under new weights, which come over a group of the rank and its engine."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SIZE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in {**launcher, **elastic}.items()})
    policy, total = tiny_policy(dtype="float32", context=512), torch.ones(1)
    requests = make_requests(8, group_size=2, seed=rank)
    with sglang(weights="distributed") as backend:
        started(backend, policy, RunAheadDrafter(HistoryTreeDrafter()))
        moved(policy, by=0.02 * (1 + rank))  # which engine has whose weights can be told
        backend.sync_weights(policy.model.named_parameters(), 1)
        dist.all_reduce(total)
        answers = answered(backend, requests)
        port = backend.engine.port
        dist.barrier()
    share = equal(answers, embedded(policy, requests))
    (Path(folder) / f"{rank}.json").write_text(json.dumps([share, port, total.item()]))
    dist.destroy_process_group()


def test_each_has_its_own_engine_weights_and_answers(tmp_path):
    torch.multiprocessing.spawn(live, (str(tmp_path),), nprocs=SIZE)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(SIZE)]
    print(found)
    assert found[0][1] != found[1][1]
    for share, _, total in found:
        assert share >= 0.95
        assert total == SIZE
