"""Peak memory of the update, in MB of the CPU's allocator, by vocabulary and by length.

A tiny Qwen2 with tied embeddings is made and takes two optimizer steps (GRPO with an entropy bonus, so that the head's
gradient has all its terms) on a few samples; the peak counts everything that is allocated on the way: weights, gradients, the
optimizer's states, activations, logits. `allowed_mb` is what a vocabulary may add to the smallest one's peak: the head's
weights, gradient and two optimizer states, and 4 x chunk_tokens x vocabulary x 4 bytes. The lengths are measured at the largest
vocabulary. A figure is exact, so there are no repeats.

    python benchmarks/update_memory.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from torch.profiler import ProfilerActivity, profile

from rhymerl.algos import GRPO
from rhymerl.testing import make_requests, tiny_policy
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.updater import Updater
from rhymerl.types import Completion, Output, Sample

MB = 1e6


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that is allocated at a time, of what `work` allocates; by torch's record of the CPU's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    kineto = recorded.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(held.max())


def make_samples(count: int, length: int) -> list[Sample]:
    """Equally long answers, half of them right."""
    samples = []
    for number, request in enumerate(make_requests(count, prompt_tokens=(8, 8), max_tokens=length)):
        tokens = np.full(length, 2, np.int32)
        generated = Output(token_ids=tokens, logprobs=np.zeros(length), policy_versions=np.zeros(length, np.int32))
        completion = Completion(request=request, output=replace(generated, finish_reason="length"))
        mask = np.ones(length, np.bool_)
        samples.append(Sample(completion=completion, text="", reward=float(number % 2), rewards={}, loss_mask=mask))
    return samples


def update_twice(vocabulary: int, length: int, arguments: Any) -> None:
    policy = tiny_policy(
        dtype="float32",
        hidden_size=arguments.hidden,
        tied=True,
        context=length + 8,
        peaked=1.0,
        vocab_size=vocabulary,
    )
    settings = UpdateSettings(
        chunk_tokens=arguments.chunk_tokens, micro_batch_tokens=arguments.micro_batch_tokens, learning_rate=1e-3
    )
    model = policy.model.train()
    optimizer = settings.optimizer(list(model.parameters()))
    updater = Updater(
        model,
        GRPO(scale="batch", entropy_coef=0.01),
        settings,
        temperature=1.0,
        seed=arguments.seed,
        backward=torch.Tensor.backward,
        autocast=nullcontext,
    )
    samples = make_samples(max(2, arguments.tokens // length), length)
    schedule = settings.schedule(optimizer, 2)
    for step in range(2):
        updater.run(samples, step, optimizer=optimizer, schedule=schedule)


def allowed_bytes(vocabulary: int, arguments: Any) -> int:
    """The head's weights, gradient and two states, and four chunks of logits."""
    return int(4 * vocabulary * (4 * arguments.hidden + 4 * arguments.chunk_tokens))


def measured(vocabulary: int, length: int, arguments: Any) -> float:
    return peak_bytes(lambda: update_twice(vocabulary, length, arguments)) / MB


def row(vocabulary: int, length: int, peak: float, smallest: float, arguments: Any) -> dict[str, Any]:
    return {
        "vocabulary": vocabulary,
        "length": length,
        "peak_mb": round(peak, 1),
        "above_smallest_mb": round(peak - smallest, 1),
        "allowed_mb": round(allowed_bytes(vocabulary, arguments) / MB, 1),
    }


def draw(rows: Sequence[record.Row], path: Path, *, vocabularies: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2))
    left, right = figure.subplots(1, 2, sharey=True)
    by_vocabulary, by_length = rows[:vocabularies], rows[vocabularies:]
    smallest = by_vocabulary[0]["peak_mb"]
    left.plot([r["vocabulary"] for r in by_vocabulary], [r["peak_mb"] for r in by_vocabulary], "o-", label="peak")
    allowed = [smallest + r["allowed_mb"] for r in by_vocabulary]
    left.plot([r["vocabulary"] for r in by_vocabulary], allowed, "--", label="allowed")
    left.set(xlabel="vocabulary", ylabel="MB", ylim=(0, None))
    left.legend(frameon=False)
    right.plot([r["length"] for r in by_length], [r["peak_mb"] for r in by_length], "o-")
    right.set(xlabel="response tokens", xscale="log")
    left.locator_params(axis="x", nbins=4)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[1_000, 20_000, 50_000, 100_000, 150_000])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--tokens", type=int, default=1024, help="response tokens of a step")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--chunk-tokens", type=int, default=64)
    parser.add_argument("--micro-batch-tokens", type=int, default=512)
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads)
    start = record.environment()
    first, largest = min(arguments.lengths), max(arguments.vocabularies)
    cases = [(vocabulary, first) for vocabulary in sorted(arguments.vocabularies)]
    cases += [(largest, length) for length in sorted(arguments.lengths)]
    peaks = [measured(vocabulary, length, arguments) for vocabulary, length in cases]
    rows = [
        row(vocabulary, length, peak, peaks[0], arguments)
        for (vocabulary, length), peak in zip(cases, peaks, strict=True)
    ]
    result = record.finish("update_memory", __doc__, arguments, rows=rows, start=start)
    if arguments.out is not None:
        stem = f"update_memory_{arguments.hardware}_{time.strftime('%Y%m')}"
        draw(rows, arguments.out / f"{stem}.png", vocabularies=len(arguments.vocabularies))
    return result


if __name__ == "__main__":
    main()
