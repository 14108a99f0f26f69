"""The time of a draw with its log-probs on a CUDA device: the Triton kernels against the same in torch.

For each number of rows and size of the vocabulary, with and without truncation (top-k 50, top-p 0.9, min-p 0.01), on
float32 logits of standard deviation 4. Times are of the device, from events around `--calls` calls in a row; the
host's, for as many launches, are apart. Spreads are over the repeats. Without a CUDA device nothing is measured, and it
says so.

    python -m benchmarks.gpu.draw_kernel [--rows 8 64 4096] [--vocabularies 32000 151936]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import record
from rhymerl.engine import device_draw
from rhymerl.engine.truncation import Truncation


def measure(arguments: Any, rows: int, vocabulary: int, truncation: bool) -> dict[str, Any]:
    """Measure one row of the table."""
    from rhymerl.engine import triton_draw

    generator = torch.Generator("cuda").manual_seed(arguments.seed)
    logits = torch.randn(rows, vocabulary, device="cuda", generator=generator) * 4
    ones = torch.ones(rows, device="cuda")
    limits = None
    if truncation:
        top_k = torch.full((rows,), 50, device="cuda")
        limits = Truncation(temperatures=ones, top_k=top_k, top_p=ones * 0.9, min_p=ones * 0.01)
    draws = (logits, torch.arange(rows, device="cuda"), ones, ones, limits)
    ways = {"kernel": triton_draw.draw_with_logprobs, "torch": device_draw.draw_in_torch}
    tokens = [way(*draws)[0] for way in ways.values()]
    launches: dict[str, list[float]] = {name: [] for name in ways}

    def milliseconds(name: str, draw: Callable[..., object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        start.record()
        for _ in range(arguments.calls):
            draw(*draws)
        end.record()
        launches[name].append(1000 * (time.perf_counter() - begun) / arguments.calls)
        torch.cuda.synchronize()
        return start.elapsed_time(end) / arguments.calls

    measures = {name: partial(milliseconds, name, draw) for name, draw in ways.items()}
    taken = record.interleaved(measures, repeats=arguments.repeats, warm_up=2)
    pairs = zip(taken["torch"], taken["kernel"], strict=True)
    return {
        **{f"{name}_ms": record.spread(values) for name, values in taken.items()},
        **{f"{name}_launch_ms": record.spread(values[2:]) for name, values in launches.items()},
        "torch / kernel": record.spread(theirs / ours for theirs, ours in pairs),
        "other_tokens": int((tokens[0] != tokens[1]).sum()),
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=10, rows=[8, 64, 4096], vocabularies=[32_000, 151_936], calls=10)
    arguments = record.begin(parser, words)
    if not torch.cuda.is_available():
        raise SystemExit("draw_kernel.py needs a CUDA device and triton: there is no CUDA device here")
    cases = record.cases(vocabulary=arguments.vocabularies, rows=arguments.rows, truncation=[False, True])
    return record.finish("draw_kernel", __doc__, arguments, rows=record.rows_of(cases, partial(measure, arguments)))


if __name__ == "__main__":
    main()
