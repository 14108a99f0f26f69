"""The cost of giving every rank every answer of a step: the collective in which they are shared, by tokens.

Ranks on this machine, over gloo, each with an equal part of a step's answers, which are random tokens with log-probs, versions,
text and reward; `share_us` is the time of the collective a token of the whole step, `bytes` what one token is on the wire. History is fed
from these answers. The update needs them anyway, because its samples are dealt to ranks by length.

    python benchmarks/sharing.py
"""

from __future__ import annotations

import argparse
import pickle
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import record
import torch
import torch.distributed as dist
import torch.multiprocessing

from rhymerl.distributed.group import Group
from rhymerl.rollout import RECORDS
from rhymerl.rollout.results import RankResult, ScoredOutput
from rhymerl.types import Output


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--answers", type=int, default=128, help="of a step, over all ranks")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 2048, 8192])
    arguments = parser.parse_args(words)
    start = record.environment()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    torch.multiprocessing.spawn(measure, (arguments, port, results), nprocs=arguments.ranks)
    rows = [results.get() for _ in arguments.lengths]
    return record.finish("sharing", __doc__, arguments, rows=rows, start=start)


def measure(rank: int, arguments: argparse.Namespace, port: int, results: Any) -> None:
    record.set_threads(arguments.threads or 1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=arguments.ranks)
    ranks = Group(RECORDS)
    for length in arguments.lengths:
        share = make_result(arguments.answers // arguments.ranks, length, seed=rank)
        num_tokens = share.num_tokens * arguments.ranks
        times = [record.seconds(partial(ranks.gather, share)) for _ in range(arguments.repeats + 1)][1:]
        if rank == 0:
            row = {
                "length": length,
                "tokens": num_tokens,
                "share_us": record.spread(t / num_tokens * 1e6 for t in times),
            }
            results.put({**row, "bytes": round(len(pickle.dumps(share)) / share.num_tokens, 1)})
    ranks.close()
    dist.destroy_process_group()


def make_result(count: int, length: int, *, seed: int) -> RankResult:
    source = np.random.default_rng(seed)
    scored = []
    for index in range(count):
        output = Output(
            token_ids=source.integers(0, 150_000, length, dtype=np.int32),
            logprobs=-source.random(length),
            policy_versions=np.zeros(length, np.int32),
            finish_reason="stop",
            num_passes=length,
        )
        text = "x" * 4 * length  # about four characters a token
        scored.append(ScoredOutput(index=index, output=output, text=text, rewards={"reward": 1.0}))
    return RankResult(scored=scored, metrics={}, busy_s=0.0, rollout_s=0.0)


if __name__ == "__main__":
    main()
