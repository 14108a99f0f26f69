"""Two real processes in torch's group: values come as they were, and only from ranks that know the run's secret."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch.distributed as dist

from rhymerl.distributed.group import Group
from rhymerl.errors import RunError
from rhymerl.types import Output, Ratio
from tests.integration.ranked import run_ranks


def join(folder: str, secrets: list[str]) -> None:
    """Write what each rank sees of the others to a file."""
    rank = int(os.environ["LOCAL_RANK"])
    os.environ.update(RHYMERL_SECRET=secrets[rank], MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/collective", rank=rank, world_size=2)
    try:
        ranks = Group([Output])
        tokens = np.arange(3, dtype=np.int32) + rank
        mine = Output(token_ids=tokens, logprobs=-tokens / 7, policy_versions=tokens)
        found = ranks.gather([mine, mine])[1 - rank][1]
        said = {
            "tokens": found.token_ids.tolist(),
            "logprobs": found.logprobs.tolist(),
            "broadcast": ranks.broadcast({"of": rank, "text": "x" * 100_000})["of"],
            "ratio": ranks.gather(Ratio(rank, 4))[1].part,
        }
        ranks.close()
    except RunError as error:
        said = {"error": str(error)}
    Path(folder, str(rank)).write_text(json.dumps(said))
    dist.destroy_process_group()


def of_both(folder: Path, secrets: list[str]) -> list[dict[str, object]]:
    run_ranks(2, join, str(folder), secrets, output=folder / "output")
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


def test_what_they_say_comes_as_it_was(tmp_path):
    for rank, said in enumerate(of_both(tmp_path, ["the same of both ranks"] * 2)):
        tokens = np.arange(3) + 1 - rank
        assert said == {"tokens": tokens.tolist(), "logprobs": (-tokens / 7).tolist(), "broadcast": 0, "ratio": 1}


def test_ranks_without_a_secret_in_common_say_so_on_each_side(tmp_path):
    for rank, said in enumerate(of_both(tmp_path, ["one secret of two", "another one of two"])):
        assert str(said["error"]).startswith(f"rank {1 - rank} has another secret than rank {rank}: set RHYMERL_SECRET")
