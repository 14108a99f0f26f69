"""The cost of drawing a token and its log-prob against the LM-head matmul that made the logits, in percent.

For each number of rows: hidden states [rows, hidden] times a float32 head [vocabulary, hidden] with
torch, then `Sampler.draw` and `Sampler.logprobs` on those logits, interleaved call by call. The logits are Gaussian
with standard deviation --logit-std: 1 is an almost flat distribution, 4 a peaked one, and under 16 most tokens are
so unlikely that a float32 cannot hold it. Spreads are over the repeats. The first round, which compiles, is not counted.

    python benchmarks/sampler.py [--vocabulary 150000] [--hidden 896] [--rows 1 8 32]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import record
import torch

from rhymerl.engine.kv_store import SlotPool
from rhymerl.engine.rows import Rows
from rhymerl.engine.sampler import HostSampler
from rhymerl.testing import make_requests

TARGET_PERCENT = 25


def make_rows(count: int, *, seed: int) -> Rows:
    """Running rows as the engine keeps them, at T = 1 without truncation."""
    rows = Rows(count, 64, SlotPool(count))
    for request in make_requests(count, seed=seed):
        rows.enter(request, None)
    return rows


def measure(count: int, logit_std: float, head: torch.Tensor, arguments: Any) -> dict[str, Any]:
    """One row of the table."""
    # Not the head's seed: hidden states that repeat its rows have one token each that towers above all others.
    hidden = torch.randn(count, arguments.hidden, generator=torch.Generator().manual_seed(arguments.seed + 1))
    hidden *= logit_std * arguments.hidden**-0.5  # the head's entries have variance 1
    logits = torch.nn.functional.linear(hidden, head)
    rows = make_rows(count, seed=arguments.seed)
    indices = row = np.arange(count)
    tokens = HostSampler(logits, rows).draw(indices, row, np.zeros(count, np.int64))
    position = 0

    def draw() -> None:
        nonlocal position
        position += 1  # other noise each time
        HostSampler(logits, rows).draw(indices, row, np.full(count, position))

    ways = {
        "matmul": lambda: torch.nn.functional.linear(hidden, head),
        "draw": draw,
        "logprobs": lambda: HostSampler(logits, rows).logprobs(indices, row, tokens),
    }
    measures = {name: partial(record.seconds, work) for name, work in ways.items()}
    with torch.no_grad():
        taken = record.interleaved(measures, repeats=arguments.repeats, warm_up=2)
    rounds = zip(taken["matmul"], taken["draw"], taken["logprobs"], strict=True)
    return {
        "rows": count,
        "logit_std": logit_std,
        **{f"{name}_ms": record.spread(1000 * s for s in values) for name, values in taken.items()},
        "share_percent": record.spread(
            100 * (draw_s + logprobs_s) / matmul_s for matmul_s, draw_s, logprobs_s in rounds
        ),
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=20)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--logit-std", nargs="+", type=float, default=[1.0, 4.0, 16.0])
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads)
    start = record.environment()
    generator = torch.Generator().manual_seed(arguments.seed)
    head = torch.randn(arguments.vocabulary, arguments.hidden, generator=generator)
    rows = [measure(count, std, head, arguments) for count in arguments.rows for std in arguments.logit_std]
    return record.finish("sampler", __doc__, arguments, rows=rows, start=start, target_percent=TARGET_PERCENT)


if __name__ == "__main__":
    main()
