"""Memory of a rank under `trainer.strategy=fsdp2`, in MB of the CPU's allocator, by the number of ranks.

A wide Llama of random weights takes two optimizer steps (GRPO) on a few samples, by ranks on gloo. `state_mb` is what a
rank holds for good: its part of the weights, of the gradient and of both moments. `peak_mb` is the most that is
allocated in the second step, which has the gathered layers, their gradients and the activations besides. The largest
rank counts. `said_state_mb` and `said_peak_mb` are what `rhymerl plan` says of these, the latter without its reserve.
The first row is one process without sharding. A figure is exact, so there are no repeats.

    python -m benchmarks.update.sharded_memory
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import record
from benchmarks.update.shared_prefixes import MB, sample_of, updater_of
from rhymerl.algos import GRPO
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.distributed import Alone
from rhymerl.distributed.group import Group
from rhymerl.drafters import NoDrafter
from rhymerl.memory.base import Layout
from rhymerl.memory.parts import rank_memory
from rhymerl.models.sharding import shard
from rhymerl.testing import make_requests, tiny_policy
from rhymerl.training.memory import make_setup
from rhymerl.training.settings import UpdateSettings

SECOND = "the second step"
NUM_SAMPLES, PROMPT_TOKENS = 8, 8


def held_bytes(tensors: Sequence[torch.Tensor]) -> int:
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.nbytes for each in parts)


def model_of(arguments: Any) -> Any:
    policy = tiny_policy(
        "llama",
        dtype="float32",
        hidden_size=arguments.hidden,
        num_layers=arguments.layers,
        context=arguments.length + 8,
        peaked=1.0,
        vocab_size=arguments.vocabulary,
    )
    return policy.model.train()


def settings_of() -> UpdateSettings:
    return UpdateSettings(chunk_tokens=64, micro_batch_tokens=256, learning_rate=1e-3)


def said(arguments: Any, layout: Layout) -> dict[str, float]:
    """What is computed of a rank's memory, in MB."""
    settings, longest = settings_of(), arguments.length + PROMPT_TOKENS
    run: Any = SimpleNamespace(
        model=model_of(arguments),
        critic=None,
        reference=None,
        algo=GRPO(),
        update=settings,
        backend=EmbeddedBackend(),
        drafter=NoDrafter(),
        budget=None,
    )
    setup = make_setup(
        run,
        layout=layout,
        precision="32-true",
        longest=longest,
        step_tokens=NUM_SAMPLES // layout.num_ranks * longest,
        chunk_tokens=settings.chunk_tokens or 0,
        offloads_optimizer=False,
    )
    parts = rank_memory(setup).parts
    state = parts["weights"] + parts["gradients"] + parts["moments"]
    return {
        "said_state_mb": state / MB,
        "said_peak_mb": (state + parts["activations"] + parts["head_chunks"] + parts["gathered"]) / MB,
    }


def update_twice(arguments: Any, ranks: Any, *, is_sharded: bool) -> int:
    """Return the bytes of weights, gradients and moments that this rank holds."""
    model = model_of(arguments)
    if is_sharded:
        shard(model, init_device_mesh("cpu", (ranks.size,)))
    settings = settings_of()
    optimizer = settings.optimizer(list(model.parameters()))
    updater = updater_of(model, settings, arguments.seed, ranks=ranks)
    requests = make_requests(NUM_SAMPLES, prompt_tokens=(PROMPT_TOKENS, PROMPT_TOKENS))
    answer = np.full(arguments.length, 2, np.int32)
    samples = [sample_of(each.prompt, n, answer, reward=float(n % 2)) for n, each in enumerate(requests)]
    schedule = settings.schedule(optimizer, 2)
    updater.run(samples, 0, optimizer=optimizer, schedule=schedule)
    with record_function(SECOND):
        updater.run(samples, 1, optimizer=optimizer, schedule=schedule)
    parameters: list[nn.Parameter] = list(model.parameters())
    gradients = [each.grad for each in parameters if each.grad is not None]
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return held_bytes([*parameters, *gradients, *moments])


def measured(arguments: Any, ranks: Any, *, is_sharded: bool) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        state = update_twice(arguments, ranks, is_sharded=is_sharded)
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    begin = next(event.start_ns() for event in events if event.name() == SECOND)
    changes = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    held = np.cumsum([event.nbytes() for event in changes])
    is_second = np.array([event.start_ns() >= begin for event in changes])
    return {"state_mb": state / MB, "peak_mb": float(held[is_second].max()) / MB}


def work(rank: int, size: int, folder: str, arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    ranks = Group()
    Path(folder, f"{rank}.json").write_text(json.dumps(measured(arguments, ranks, is_sharded=True)))
    ranks.close()
    dist.destroy_process_group()


def on_ranks(size: int, arguments: Any) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (size, folder, arguments), nprocs=size)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {name: max(each[name] for each in found) for name in found[0]}


def layout_of(sharding: str, size: int) -> Layout:
    return Layout(num_ranks=size, is_sharded=sharding == "fsdp2")


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--length", type=int, default=64)
    arguments = parser.parse_args(words)
    os.environ.setdefault("RHYMERL_SECRET", "known to the ranks of this benchmark")
    record.set_threads(arguments.threads)
    start = record.environment()
    whole = measured(arguments, Alone(), is_sharded=False)
    found = [("none", 1, whole), *(("fsdp2", size, on_ranks(size, arguments)) for size in arguments.ranks)]
    rows = [
        {
            "sharding": sharding,
            "ranks": size,
            **{name: round(value, 1) for name, value in each.items()},
            **{name: round(value, 1) for name, value in said(arguments, layout_of(sharding, size)).items()},
            "state / none": round(each["state_mb"] / whole["state_mb"], 3),
            "peak / none": round(each["peak_mb"] / whole["peak_mb"], 3),
        }
        for sharding, size, each in found
    ]
    return record.finish("sharded_memory", __doc__, arguments, rows=rows, start=start)


if __name__ == "__main__":
    main()
