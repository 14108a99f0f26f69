"""Short waits: seconds of what a user or a step waits for in passing, which nobody should notice. Tests count what these do instead.

`import` and `help` start an interpreter; `first_answer` is an engine's, in an interpreter of its own without numba's cache. `plan` divides 100 000 requests among 1 024
workers, and `decision` asks the coordinator half-way through 16 384 requests of as many workers what moves. `checkpoint` saves and loads a history of a million tokens, `trace` reads the sample
trace, `similarity` compares its epochs, and `samples` sends 5 000 of them through reward processes. `--scale` makes the last six smaller.

    python benchmarks/short_waits.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

from rhymerl.history import Answer, HistoryStore
from rhymerl.history.similarity import length_stability, similarity
from rhymerl.history.traces import read_trace
from rhymerl.rewards import Reward, RewardScorer
from rhymerl.rollout.base import RolloutSettings, requests_of
from rhymerl.schedulers import HistoPipeScheduler
from rhymerl.testing import make_prompt
from rhymerl.types import Completion, Output, RolloutRequest, Sample
from rhymerl.workers.coordinator import Coordinator, ProgressReport, make_plan

TRACE = Path(__file__).parent / "traces" / "running_sum.jsonl.gz"
FIRST_ANSWER = """
from rhymerl.engine.engine import Engine
from rhymerl.testing import make_requests, tiny_policy
engine = Engine(tiny_policy(dtype="float32").model)
engine.submit(make_requests(1, max_tokens=2))
while engine.has_work:
    engine.run()
"""

Wait = Callable[[], float]  # does it, and returns its seconds


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=5)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", nargs="+", help="names of waits (default: all)")
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads)
    start = record.environment()
    with tempfile.TemporaryDirectory() as folder, RewardScorer([Reward("builtins.len")]) as scorer:
        waits: dict[str, Wait] = {
            "import": interpreter("-c", "import rhymerl"),
            "help": interpreter("-m", "rhymerl", "--help"),
            "first_answer": first_answer,
            **planning(arguments.scale),
            "checkpoint": saving(arguments.scale, Path(folder) / "state.ckpt"),
            **reading(arguments.scale),
            "samples": scoring(arguments.scale, scorer),
        }
        if unknown := set(arguments.only or waits) - waits.keys():
            parser.error(f"--only: no wait is called {', '.join(sorted(unknown))}; expected some of {', '.join(waits)}")
        chosen = {name: waits[name] for name in arguments.only or waits}
        found = record.interleaved(chosen, repeats=arguments.repeats)
    rows = [{"what": name, "seconds": record.spread(values)} for name, values in found.items()]
    return record.finish("short_waits", __doc__, arguments, rows=rows, start=start)


def interpreter(*words: str, **variables: str) -> Wait:
    command, environment = [sys.executable, *words], {**os.environ, **variables}
    return partial(record.seconds, partial(subprocess.run, command, check=True, capture_output=True, env=environment))


def first_answer() -> float:
    with tempfile.TemporaryDirectory() as cache:
        return interpreter("-c", FIRST_ANSWER, NUMBA_CACHE_DIR=cache)()


def planning(scale: float) -> dict[str, Wait]:
    num_workers = max(int(1024 * scale), 2)
    scheduler, many = learned(HistoPipeScheduler(), num_workers * 6), requests(num_workers * 6, 16)
    fewer = requests(2 * num_workers, 8)
    plan = make_plan(scheduler, fewer, num_workers=num_workers, step=1)
    half = range(0, len(fewer), 2)
    report = ProgressReport(finished=[*half], tokens={index + 1: 100 for index in half})

    def decide() -> float:
        coordinator = Coordinator(scheduler, fewer, plan, step=1, following=None, keeps=True, every=1)
        return record.seconds(lambda: coordinator.decide([(0, report)]))

    return {"plan": partial(record.seconds, partial(scheduler.plan, many, num_workers, 1)), "decision": decide}


def requests(num_prompts: int, group_size: int) -> list[RolloutRequest]:
    prompts = [make_prompt([3, number % 997, number // 997], id=str(number)) for number in range(num_prompts)]
    settings = RolloutSettings(group_size=group_size, max_tokens=16_384)
    return requests_of(prompts, 1, settings, seed=0, stop_token_ids=[1])


def learned(scheduler: HistoPipeScheduler, num_prompts: int) -> HistoPipeScheduler:
    """The scheduler, once it knows how long an answer to each prompt was."""
    lengths = np.random.default_rng(0).lognormal(5, 1, num_prompts).astype(int) + 1
    scheduler.learn(
        [answered(request, length) for request, length in zip(requests(num_prompts, 1), lengths, strict=True)]
    )
    return scheduler


def answered(request: RolloutRequest, length: int) -> Sample:
    zeros = np.zeros(length, np.int32)
    output = Output(token_ids=zeros, logprobs=np.zeros(length), policy_versions=zeros, finish_reason="stop")
    completion = Completion(request=request, output=output)
    return Sample(completion=completion, text="", reward=0.0, rewards={}, loss_mask=np.ones(length, np.bool_))


def saving(scale: float, path: Path) -> Wait:
    store, source = HistoryStore(), np.random.default_rng(0)
    named: Any = {"reward": 0.0, "advantage": 0.0, "finish_reason": "stop", "policy_version": 0, "epoch": 0}
    for number in range(max(int(1000 * scale), 1)):
        answers = [Answer(token_ids=source.integers(0, 50_000, 125, np.int32), sample=at, **named) for at in range(8)]
        store.add(make_prompt([number], id=str(number)), answers)

    def save() -> None:
        torch.save(store.state_dict(), path)
        HistoryStore().load_state_dict(torch.load(path, weights_only=True))

    return partial(record.seconds, save)


def reading(scale: float) -> dict[str, Wait]:
    count = max(int(8192 * scale), 1)
    listed = list(islice(read_trace(TRACE), count))
    return {
        "trace": partial(record.seconds, lambda: list(islice(read_trace(TRACE), count))),
        "similarity": partial(record.seconds, lambda: (similarity(listed), length_stability(listed))),
    }


def scoring(scale: float, scorer: RewardScorer) -> Wait:
    def score() -> None:
        for number in range(max(int(5000 * scale), 1)):
            scorer.submit(str(number), "x" * 100, {"answer": "x"})
        scorer.collect()

    return partial(record.seconds, score)


if __name__ == "__main__":
    main()
