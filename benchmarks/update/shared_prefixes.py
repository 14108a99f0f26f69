"""An update that computes shared prefixes of a group once, against one that computes each answer by itself.

A Llama of SmolLM2-135M's shape with random weights takes optimizer steps (GRPO, AdamW), with and without sharing in
turn (update.share_prefixes). Prompts and answers are random, so that answers have only their prompt in common, or
recorded (benchmarks/traces/): the first and the last epoch of a real SmolLM2 that learns to add. `time` is shared over
separate rows, step by step; `tokens` is the same ratio of the tokens that the layers compute, below which the head and
AdamW keep the time from falling. `peak_mb` is the most that a step allocates beyond weights and moments, gradients
among it. Lengths of random answers are spread evenly over their range.

    python -m benchmarks.update.shared_prefixes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import record
from benchmarks.gpu.bare import sample
from benchmarks.update.optimizer_step import optimizer_step
from rhymerl.history.traces import read_trace
from rhymerl.models.logprobs import token_batch
from rhymerl.models.policy import PolicySource
from rhymerl.testing import make_prompt
from rhymerl.training.batches import micro_batches
from rhymerl.training.settings import UpdateSettings
from rhymerl.types import Completion, Output, Prompt, RolloutRequest, Sample, SamplingParams

if TYPE_CHECKING:
    from rhymerl.types import IntArray

MB = 1e6
# prompts, answers to each, tokens of a prompt, and of the shortest and the longest answer
RANDOM = {
    "addition": (6, 6, 45, 16, 20),
    "long prompts": (1, 8, 400, 60, 140),
    "short prompts": (4, 8, 15, 30, 80),
    "long answers": (1, 4, 45, 800, 1200),
}


# traces, the number of an epoch, and prompts of it
RECORDED = {
    "additions, first epoch": ("smollm2_addition", 0, 6),
    "additions, last epoch": ("smollm2_addition", -1, 6),
    "long sums, first epoch": ("smollm2_long_sum", 0, 6),
    "long sums, last epoch": ("smollm2_long_sum", -1, 6),
}
CASES = [*RANDOM, *RECORDED]


def make_model(arguments: Any) -> torch.nn.Module:
    init = {
        "model_type": "llama",
        "vocab_size": arguments.vocabulary,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    }
    return PolicySource(init=init, seed=arguments.seed).load().model.train()


def make_samples(case: str, arguments: Any) -> list[Sample]:
    """Random rewards, so that there is something to learn."""
    source = np.random.default_rng(arguments.seed)
    answers = recorded(*RECORDED[case]) if case in RECORDED else drawn(*RANDOM[case], source, arguments.vocabulary)
    return [sample_of(*each, reward=float(source.random())) for each in answers]


def drawn(
    prompts: int, group: int, width: int, shortest: int, longest: int, source: np.random.Generator, vocabulary: int
) -> Iterator[tuple[Prompt, int, IntArray]]:
    """Yield prompts, and the number and the tokens of each answer."""
    for number in range(prompts):
        prompt = make_prompt(source.integers(0, vocabulary, width).tolist(), id=str(number))
        for index, length in enumerate(np.linspace(shortest, longest, group).round().astype(int).tolist()):
            yield prompt, index, source.integers(0, vocabulary, length).astype(np.int32)


def recorded(trace: str, epoch: int, prompts: int) -> Iterator[tuple[Prompt, int, IntArray]]:
    """Yield the same of the first prompts of an epoch."""
    answers = list(read_trace(Path(__file__).parents[1] / "traces" / f"{trace}.jsonl.gz"))
    chosen = sorted({each.epoch for each in answers})[epoch]
    names = list(dict.fromkeys(each.prompt_id for each in answers))[:prompts]
    for each in answers:
        if each.epoch == chosen and each.prompt_id in names:
            prompt = make_prompt(list(each.prompt_tokens), id=each.prompt_id)
            yield prompt, each.sample, np.array(each.response_tokens, np.int32)


def sample_of(prompt: Prompt, index: int, tokens: IntArray, *, reward: float) -> Sample:
    sampling = SamplingParams(max_tokens=len(tokens))
    request = RolloutRequest(id=f"{prompt.id}/{index}", prompt=prompt, sample=index, seed=index, sampling=sampling)
    output = Output.of(tokens, logprob=-10.0, finish_reason="stop")
    return sample(Completion(request=request, output=output), reward)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that is allocated at a time, of what `work` allocates; by torch's record of the CPU's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    kineto = recorded.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(held.max())


def token_share(samples: Sequence[Sample], max_tokens: int) -> float:
    """Tokens that the layers compute when what is common is shared, padding included, over those of separate rows."""
    tokens = {
        shares: sum(
            token_batch([samples[i] for i in part], "cpu", shares=shares).input_ids.numel()
            for part in micro_batches(samples, range(len(samples)), max_tokens, shares=shares)
        )
        for shares in (True, False)
    }
    return tokens[True] / tokens[False]


def measured(arguments: Any, case: str) -> dict[str, Any]:
    samples, model = make_samples(case, arguments), make_model(arguments)
    settings = UpdateSettings(learning_rate=1e-7, micro_batch_tokens=arguments.micro_batch_tokens)
    optimizer = settings.optimizer(list(model.parameters()))
    ways = {
        name: optimizer_step(
            model, samples, settings, optimizer,
            seed=arguments.seed, autocast=nullcontext, draws_exactly=True, shares_prefixes=shares,
        )
        for name, shares in (("rows", False), ("shared", True))
    }  # fmt: skip
    times = record.interleaved(
        {name: partial(record.seconds, way) for name, way in ways.items()}, repeats=arguments.repeats
    )
    ratios = [shared / rows for shared, rows in zip(times["shared"], times["rows"], strict=True)]
    peaks = {name: peak_bytes(way) for name, way in ways.items()}
    return {
        "time": record.spread(ratios),
        "tokens": round(token_share(samples, arguments.micro_batch_tokens), 3),
        "rows_s": record.spread(times["rows"]),
        "shared_s": record.spread(times["shared"]),
        "rows_peak_mb": round(peaks["rows"] / MB),
        "shared_peak_mb": round(peaks["shared"] / MB),
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=3, layers=30, vocabulary=49_152, micro_batch_tokens=2048)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    arguments = record.begin(parser, words)
    rows = record.rows_of(record.cases(case=arguments.cases), partial(measured, arguments))
    return record.finish("shared_prefixes", __doc__, arguments, rows=rows)


if __name__ == "__main__":
    main()
