"""Two ranks of a trainer, each with an engine of its own, on one node or on two."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rhymerl.backends.remote.node import NodePosition
from rhymerl.backends.remote.process import held_port
from rhymerl.backends.remote.weight_group import WeightGroup
from rhymerl.backends.sglang.arguments import check_for_ranks
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.drafters import HistoryTreeDrafter, NoDrafter
from rhymerl.errors import ConfigError
from rhymerl.testing import make_requests
from tests.backends.sglang.conftest import make_flat_policy
from tests.backends.sglang.test_server import ENVIRONMENT, PATH
from tests.backends.sglang.test_session import all_of, assert_whole, synced
from tests.backends.sglang.weights_engine import weights_engine
from tests.integration.ranked import run_ranks

SIZE = 2
LEAKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"}


def launched(rank: int, folder: str) -> None:
    """Become one of the ranks, with all that torchrun and SLURM say of it."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    of_all = {"WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": SIZE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    of_one = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "NODE_RANK": 0, "SLURM_PROCID": rank}
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_RUN_ID": "x"}
    os.environ.update({name: str(value) for name, value in {**of_all, **of_one, **elastic}.items()})


def live(folder: str) -> None:
    """All that a rank does here, one after the other: starting processes takes most of the time."""
    rank = int(os.environ["LOCAL_RANK"])
    launched(rank, folder)
    found = {"refused": refuse(rank), "answered": answer(rank, folder), "weights": hand_over(rank)}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """Return what the ranks have found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(SIZE, live, str(folder), output=folder / "output")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


# -- engines of their own ------------------------------------------------------------------------------------------


def answer(rank: int, folder: str) -> dict:
    sys.path.insert(0, str(PATH))
    policy = make_flat_policy()
    requests = make_requests(10, seed=rank)
    with SGLangBackend(max_running=2, environment=ENVIRONMENT, folder=f"{folder}/files") as backend:
        backend.start(policy, HistoryTreeDrafter())
        synced(backend, policy, 0)
        backend.submit(requests)
        assert_whole(all_of(backend, 10), requests)
        server = backend.server.server
        variables = Path(f"/proc/{server._process.pid}/environ").read_text().split("\0")
        folders = backend.own_folder, backend.weights_folder
        return {
            "port": server.port,
            "arguments": server.log.read_text().split("arguments: ")[1].split("\n")[0].split(),
            "variables": dict(variable.split("=", 1) for variable in variables if variable),
            "folders": [str(each.relative_to(folder)) for each in folders],
        }


def test_engines_share_neither_ports_nor_folders_nor_the_trainers_names(ranks):
    first, second = (each["answered"] for each in ranks)
    for rank, each in enumerate((first, second)):
        assert all(folder.startswith(f"files/rank{rank}/") for folder in each["folders"])
        assert "PATH" in each["variables"]
        assert not LEAKS & each["variables"].keys()
        assert not [name for name in each["variables"] if name.startswith("TORCHELASTIC")]
    ports = [each["arguments"][each["arguments"].index("--nccl-port") + 1] for each in (first, second)]
    assert len({*ports, str(first["port"]), str(second["port"])}) == 4


def test_a_port_that_is_held_may_be_listened_at():
    with held_port() as held, held_port() as other, socket.socket() as server:
        name = held.getsockname()
        assert name != other.getsockname()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(name)
        server.listen()
        held.close()
        with socket.create_connection(name):
            pass


# -- what they cannot share ----------------------------------------------------------------------------------------


def refused(**settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        SGLangBackend(**settings).start(None, NoDrafter())
    return str(caught.value)


def refuse(rank: int) -> dict:
    here = NodePosition.of_this_process()
    messages = [
        refused(tensor_parallel=2),
        refused(arguments={"base-gpu-id": 3}),
    ]
    dist.barrier()
    name, socket.gethostname = socket.gethostname, lambda: f"node {rank}"
    apart = NodePosition.of_this_process()
    dist.barrier()
    socket.gethostname = name
    return {"messages": messages, "here": [here.rank, here.num_ranks, here.num_here], "apart": apart.num_here}


def test_what_ranks_would_share_is_refused(ranks):
    for rank, each in enumerate(ranks):
        found = each["refused"]
        assert found["here"] == [rank, SIZE, SIZE]
        assert found["apart"] == 1
        parallel, argument = found["messages"]
        assert parallel.startswith("backend.tensor_parallel=2: expected 1 with 2 ranks on a node")
        assert argument.startswith("backend.arguments.base-gpu-id=3: cannot be the same for all ranks")


def test_one_process_is_alone():
    assert NodePosition.of_this_process() == NodePosition(rank=0, num_ranks=1, num_here=1)
    check_for_ranks({"mem_fraction_static": 0.5})


# -- weights over a group ------------------------------------------------------------------------------------------


def hand_over(rank: int) -> dict:
    """Hand new weights to the rank's engine, twice; the trainer's group ends before the last one."""
    named = {"a": torch.arange(6.0).view(2, 3) + 100 * rank, "b": torch.ones(4, dtype=torch.float64)}
    with weights_engine() as engine:
        sums = []
        group = WeightGroup(engine, ranks=1, device=torch.device("cpu"))
        for version in range(2):
            group.send([(name, tensor + version) for name, tensor in named.items()], torch.float32, version=version)
            sums.append(engine.get("/sums"))
        group.close()
        total = torch.ones(1)
        dist.all_reduce(total)
        last = WeightGroup(engine, ranks=1, device=torch.device("cpu"))
        dist.destroy_process_group()
        last.close()
    return {"sums": sums, "total": total.item()}


def test_each_rank_has_a_group_with_its_own_engine(ranks):
    for rank, each in enumerate(ranks):
        found = each["weights"]
        right = [{"a": 15.0 + 600 * rank + 6 * version, "b": 4.0 + 4 * version} for version in range(2)]
        assert found["sums"] == right
        assert found["total"] == SIZE
