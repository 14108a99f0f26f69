"""An optimizer step on this GPU: seconds, tokens a second and the peak of its memory, with shared prompts and without.

Groups of eight answers of the policy itself, weights and moments in float32, products in bfloat16 on a GPU.
`shares_prefixes` computes a prompt once for its group, and once what several answers begin with
(`update/shared_prefixes.py` has it on a CPU). Spreads are over the steps, of which the first is not counted.

    python -m benchmarks.gpu.update --samples 64
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch

from benchmarks import record
from benchmarks.gpu.bare import answers, options, policy_of, requests, sample
from benchmarks.gpu.device_time import device, milliseconds
from benchmarks.update.optimizer_step import optimizer_step
from rhymerl.engine.engine import Engine
from rhymerl.training.batches import total_tokens
from rhymerl.training.settings import UpdateSettings
from rhymerl.types import Sample


def make_samples(arguments: Any) -> list[Sample]:
    """Every other answer is right."""
    policy = policy_of(arguments.size, "float32", arguments.seed)
    engine = Engine(policy.model, max_running=arguments.samples)
    done = answers(engine, requests(policy, arguments.samples, arguments, "update"))
    return [sample(each, reward=float(number % 2)) for number, each in enumerate(done)]


def measure(arguments: Any, samples: Sequence[Sample], shares_prefixes: bool) -> dict[str, Any]:
    model = policy_of(arguments.size, "float32", arguments.seed).model.train()
    settings = UpdateSettings(learning_rate=1e-9, micro_batch_tokens=arguments.micro_batch_tokens)
    optimizer, on_gpu = settings.optimizer(list(model.parameters())), device() == "cuda"
    autocast = partial(torch.autocast, "cuda", torch.bfloat16) if on_gpu else nullcontext
    how = {"seed": arguments.seed, "autocast": autocast, "shares_prefixes": shares_prefixes}
    step = optimizer_step(model, samples, settings, optimizer, **how)
    if on_gpu:
        gc.collect()  # the engine that made the samples
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    taken = milliseconds(step, repeats=arguments.repeats, warm_up=1)
    tokens = sum(map(total_tokens, samples))
    return {
        "step_s": record.spread(each / 1e3 for each in taken),
        "tokens_per_s": record.spread(1e3 * tokens / each for each in taken),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if on_gpu else None,
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = record.begin(options(__doc__, repeats=4, samples=64, micro_batch_tokens=16_384), words)
    samples = cache(partial(make_samples, arguments))  # not made where all rows are known
    cases = record.cases(size=[arguments.size], shares_prefixes=[False, True])
    rows = record.rows_of(cases, lambda size, shares_prefixes: measure(arguments, samples(), shares_prefixes))
    return record.finish("gpu_update", __doc__, arguments, rows=rows)


if __name__ == "__main__":
    main()
