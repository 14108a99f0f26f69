"""A pass of the embedded engine by running requests and draft nodes: milliseconds, kernel launches, device waits.

The milliseconds are medians of whole steps, with scheduling, drafting and drawing. Drafts are paths that nothing stands
for, so that few nodes are accepted and every pass verifies as many. Launches, copies and waits are those of one further
pass, counted by the profiler on a GPU only; a wait is a synchronisation of a stream or an event, which `.cpu()` and
boolean indices make too.

    python -m benchmarks.gpu.engine --running 1 8 32 128 --nodes 0 4 16
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import record
from benchmarks.gpu.bare import options, policy_of, requests
from benchmarks.gpu.device_time import device
from rhymerl.bench.costs import PathDrafter
from rhymerl.budgets import FixedBudget
from rhymerl.drafters import NoDrafter
from rhymerl.engine.engine import Engine

NOT_COUNTED = 3  # passes: prompts are read, and kernels of new shapes compiled
COUNTED = {  # by the end or the middle of the names of CUDA's calls
    "launches": ("LaunchKernel",),
    "copies": ("MemcpyAsync",),
    "waits": ("StreamSynchronize", "EventSynchronize"),
}


def measure(arguments: Any, size: str, running: int, nodes: int) -> dict[str, Any]:
    policy = policy_of(size, arguments.dtype, arguments.seed)
    drafter = PathDrafter(nodes, vocabulary=policy.model.config.vocab_size) if nodes else NoDrafter()
    engine = Engine(policy.model, drafter=drafter, budget=FixedBudget(nodes), max_running=running)
    engine.submit(requests(policy, running, arguments, "passes"))
    taken: list[float] = []
    with engine.forward.ready():
        while engine.has_work and len(taken) < NOT_COUNTED + arguments.passes:
            taken.append(1e3 * record.seconds(engine.step))
        calls = profiled(engine) if device() == "cuda" and engine.has_work else {}
    counted = taken[NOT_COUNTED:]
    if not counted:
        raise SystemExit(f"--tokens={arguments.tokens}: answers ended before a pass was counted")
    return {"pass_ms": record.spread(counted), "passes": len(counted), **calls}


def profiled(engine: Engine) -> Mapping[str, int]:
    """Return how often a pass calls what is counted."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        engine.step()
    calls = Counter[str]()
    for event in profile.key_averages():
        calls.update({name: event.count for name, parts in COUNTED.items() if any(part in event.key for part in parts)})
    return {name: calls[name] for name in COUNTED}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = record.begin(options(__doc__, running=[1, 8, 32, 128], nodes=[0, 4, 16], passes=40), words)
    cases = record.cases(size=[arguments.size], nodes=arguments.nodes, running=arguments.running)
    return record.finish("gpu_engine", __doc__, arguments, rows=record.rows_of(cases, partial(measure, arguments)))


if __name__ == "__main__":
    main()
