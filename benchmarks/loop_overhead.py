"""The overhead of the rollout loop for each sample, in milliseconds, and whether its memory stays flat over an epoch.

An epoch of --prompts synthetic prompts x --group-size samples goes through RolloutLoop (FIFOScheduler, NoDrafter)
in steps of --prompts-per-step, answered at once by `rhymerl.testing.ScriptedBackend` with 16 to 128 tokens.
Four ways, interleaved step by step; the first two steps are not counted, spreads are over the steps:

- backend: the requests through the scripted backend alone, which is the fake's own share of what follows;
- loop: without reward functions, with a decoder that costs next to nothing;
- loop_decode: the same with a Hugging Face tokenizer as the decoder;
- loop_pool: `loop` with one trivial reward function in --processes reward processes.

The resident memory of this process is read at 25, 50, 75 and 100 % of the epoch, with all ways in it.

    python benchmarks/loop_overhead.py
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import record

from rhymerl.models.tokenizers import character_tokenizer
from rhymerl.rewards import Reward, RewardScorer
from rhymerl.rollout import RolloutLoop, RolloutSettings
from rhymerl.schedulers.fifo import FIFOScheduler
from rhymerl.testing import ScriptedBackend, make_prompt
from rhymerl.types import Prompt, RolloutRequest

CHARACTERS = "0123456789+=;#? \n"
TARGET_MS = 0.2
WARM_UP_STEPS = 2


def make_answers(*, seed: int) -> Callable[[RolloutRequest], np.ndarray]:
    """An answer by the request's seed, from a fixed set of 256."""
    source = np.random.default_rng(seed)
    answers = [source.integers(2, 2 + len(CHARACTERS), length) for length in source.integers(16, 129, 256)]
    return lambda request: answers[request.seed % len(answers)]


def make_prompts(count: int, *, seed: int) -> list[Prompt]:
    source = np.random.default_rng(seed)
    tokens = source.integers(2, 2 + len(CHARACTERS), (count, 16)).tolist()
    return [make_prompt(each, id=str(number), answer=str(number)) for number, each in enumerate(tokens)]


def make_loops(stack: ExitStack, arguments: Any) -> dict[str, RolloutLoop]:
    """The loops to compare; reward processes end with the stack."""
    tokenizer = character_tokenizer(CHARACTERS)
    answer = make_answers(seed=arguments.seed)

    def loop(scorer: RewardScorer, decode: Callable[[Any], str] = lambda token_ids: "text") -> RolloutLoop:
        stack.enter_context(scorer)
        backend = ScriptedBackend(answer)
        return RolloutLoop(backend, FIFOScheduler(), scorer=scorer, decode=decode, seed=arguments.seed)

    rewards = [Reward("rhymerl.rewards.exact_match")]
    return {
        "loop": loop(RewardScorer([])),
        "loop_decode": loop(RewardScorer([]), tokenizer.decode),
        "loop_pool": loop(RewardScorer(rewards, num_processes=arguments.processes)),
    }


def drain(backend: ScriptedBackend, requests: Sequence[RolloutRequest]) -> float:
    """Seconds that the scripted backend itself takes."""
    started = time.perf_counter()
    backend.submit(requests)
    left = len(requests)
    while left:
        left -= len(backend.collect())
    return time.perf_counter() - started


def resident_mb() -> float:
    """Resident memory of this process after a collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def run_epoch(loops: dict[str, RolloutLoop], arguments: Any) -> tuple[dict[str, list[float]], list[float]]:
    """Milliseconds a sample, by way and step, and the memory at each quarter."""
    prompts = make_prompts(arguments.prompts, seed=arguments.seed)
    settings = RolloutSettings(group_size=arguments.group_size, max_tokens=128)
    taken: dict[str, list[float]] = {name: [] for name in ("backend", *loops)}
    memory: list[float] = []
    size = arguments.prompts_per_step
    num_steps = -(-len(prompts) // size)
    alone = ScriptedBackend(make_answers(seed=arguments.seed))
    for step in range(num_steps):
        batch = prompts[step * size : (step + 1) * size]
        rollout = None
        for name, loop in loops.items():
            started = time.perf_counter()
            rollout = loop.run(batch, step, settings)
            taken[name].append(1000 * (time.perf_counter() - started) / len(rollout.samples))
        assert rollout is not None
        requests = [sample.completion.request for sample in rollout.samples]
        taken["backend"].append(1000 * drain(alone, requests) / len(requests))
        while len(memory) < 4 and (step + 1) * 4 >= num_steps * (len(memory) + 1):
            del rollout, requests
            rollout = requests = None
            memory.append(resident_mb())
    return {name: values[WARM_UP_STEPS:] or values for name, values in taken.items()}, memory


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompts-per-step", type=int, default=64)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads)
    start = record.environment()
    with ExitStack() as stack:
        loops = make_loops(stack, arguments)
        taken, memory = run_epoch(loops, arguments)
    rows = [{"way": name, "ms_per_sample": record.spread(values)} for name, values in taken.items()]
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return record.finish(
        "loop_overhead",
        __doc__,
        arguments,
        rows=rows,
        start=start,
        overhead_ms_per_sample=round(medians["loop"], 4),
        target_ms_per_sample=TARGET_MS,
        pool_ms_per_sample=round(medians["loop_pool"] - medians["loop"], 4),
        resident_mb_by_quarter=memory,
    )


if __name__ == "__main__":
    main()
