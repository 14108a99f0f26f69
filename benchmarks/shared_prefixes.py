"""An update that computes the prompt of a group once, against one that computes it for every answer (update.share_prefixes).

A Llama of SmolLM2-135M's shape with random weights takes optimizer steps (GRPO, AdamW) on random prompts and answers, with and
without sharing in turn. `time` is shared over separate rows, step by step; `tokens` is the same ratio of the tokens that the layers
compute, below which the head and AdamW keep the time from falling. `peak_mb` is the most that a step allocates beyond weights and moments.
Lengths of answers are spread evenly over their range.

    python benchmarks/shared_prefixes.py
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import record
import torch
from update_memory import MB, peak_bytes

from rhymerl.algos import GRPO
from rhymerl.models.policy import PolicySource
from rhymerl.testing import make_prompt
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.updater import Updater
from rhymerl.types import Completion, Output, RolloutRequest, Sample, SamplingParams

# prompts, answers to each, tokens of a prompt, and of the shortest and the longest answer
CASES = {"addition": (6, 6, 45, 16, 20), "long prompts": (1, 8, 400, 60, 140), "short prompts": (4, 8, 15, 30, 80)}


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
        "max_position_embeddings": 1024,
    }
    return PolicySource(init=init, seed=arguments.seed).load().model.train()


def make_samples(case: str, arguments: Any) -> list[Sample]:
    """Random rewards, so that there is something to learn."""
    prompts, group, width, shortest, longest = CASES[case]
    source = np.random.default_rng(arguments.seed)
    sampling = SamplingParams(max_tokens=longest)
    samples = []
    for number in range(prompts):
        prompt = make_prompt(source.integers(0, arguments.vocabulary, width).tolist(), id=str(number))
        for index, length in enumerate(np.linspace(shortest, longest, group).round().astype(int).tolist()):
            tokens = source.integers(0, arguments.vocabulary, length).astype(np.int32)
            request = RolloutRequest(id=f"{number}/{index}", prompt=prompt, sample=index, seed=index, sampling=sampling)
            output = Output(
                token_ids=tokens,
                logprobs=np.full(length, -10.0),
                policy_versions=np.zeros(length, np.int32),
                finish_reason="stop",
            )
            completion = Completion(request=request, output=output)
            mask = np.ones(length, np.bool_)
            samples.append(
                Sample(completion=completion, text="", reward=float(source.random()), rewards={}, loss_mask=mask)
            )
    return samples


def token_share(samples: Sequence[Sample]) -> float:
    """Tokens that the layers compute when prompts are shared, over those of separate rows."""
    prompts = {sample.prompt.id: len(sample.prompt.token_ids) for sample in samples}
    rows = sum(len(sample.prompt.token_ids) + len(sample) for sample in samples)
    return (sum(prompts.values()) + sum(len(sample) - 1 for sample in samples)) / rows


def measured(case: str, arguments: Any) -> dict[str, Any]:
    samples, model = make_samples(case, arguments), make_model(arguments)
    settings = UpdateSettings(learning_rate=1e-7, micro_batch_tokens=arguments.micro_batch_tokens)
    optimizer = settings.optimizer(list(model.parameters()))
    schedule = settings.schedule(optimizer, float("inf"))

    def step(shares: bool) -> None:
        updater = Updater(
            model,
            GRPO(),
            settings,
            temperature=1.0,
            seed=arguments.seed,
            backward=torch.Tensor.backward,
            autocast=nullcontext,
            draws_exactly=True,
            shares_prefixes=shares,
        )
        updater.run(samples, 0, optimizer=optimizer, schedule=schedule)

    ways = {"rows": lambda: record.seconds(lambda: step(False)), "shared": lambda: record.seconds(lambda: step(True))}
    times = record.interleaved(ways, repeats=arguments.repeats)
    ratios = [shared / rows for shared, rows in zip(times["shared"], times["rows"], strict=True)]
    peaks = {
        name: peak_bytes(lambda shares=shares: step(shares)) for name, shares in (("rows", False), ("shared", True))
    }
    return {
        "case": case,
        "time": record.spread(ratios),
        "tokens": round(token_share(samples), 3),
        "rows_s": record.spread(times["rows"]),
        "shared_s": record.spread(times["shared"]),
        "rows_peak_mb": round(peaks["rows"] / MB),
        "shared_peak_mb": round(peaks["shared"] / MB),
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads)
    start = record.environment()
    rows = [measured(case, arguments) for case in arguments.cases]
    return record.finish("shared_prefixes", __doc__, arguments, rows=rows, start=start)


if __name__ == "__main__":
    main()
