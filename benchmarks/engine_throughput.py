"""Useful tokens a second of our engine and of transformers' `model.generate`: same model, same prompts, same run.

Every prompt has its own response length, uniform in [--shortest, --longest]; stop tokens are off, sampling is
untruncated at T = 1, weights are random and float32. Prompts are equally long, which spares generate its
padding on the left. Ways, interleaved, one uncounted round first:

- engine: continuous batching with `--slots` slots and KV room for just as many longest responses;
- engine_all: as many slots as prompts;
- generate_all: one padded batch of all prompts, to the longest response;
- generate_slots: padded batches of `--slots` prompts (the engine's memory), each to its own longest response.

    python benchmarks/engine_throughput.py [--models quickstart 5M 25M] [--vocabularies 19 32000]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import record
import torch
from transformers import GenerationConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rhymerl.engine.engine import Engine
from rhymerl.testing import make_prompt
from rhymerl.types import RolloutRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Size:
    """The body of a model; the embeddings depend on the vocabulary."""

    hidden: int
    layers: int
    heads: int
    intermediate: int


SIZES = {
    "tiny": Size(32, 1, 4, 64),
    "quickstart": Size(128, 4, 4, 384),
    "5M": Size(256, 6, 4, 768),
    "25M": Size(512, 8, 8, 1536),
}


def build(name: str, vocabulary: int, *, seed: int) -> PreTrainedModel:
    size = SIZES[name]
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen2ForCausalLM(config).float().eval()


@dataclass(frozen=True, slots=True)
class Work:
    """N prompts of P tokens and how many tokens each is to be answered with."""

    prompts: np.ndarray  # [N, P]
    lengths: np.ndarray  # [N]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def requests(self) -> list[RolloutRequest]:
        pairs = zip(self.prompts.tolist(), self.lengths.tolist(), strict=True)
        return [
            RolloutRequest(
                id=str(number),
                prompt=make_prompt(tokens, id=str(number)),
                sample=0,
                seed=number,
                sampling=SamplingParams(max_tokens=length),
            )
            for number, (tokens, length) in enumerate(pairs)
        ]


def make_work(vocabulary: int, arguments: Any) -> Work:
    source = np.random.default_rng(arguments.seed)
    return Work(
        source.integers(2, vocabulary, (arguments.prompts, arguments.prompt_tokens)),
        source.integers(arguments.shortest, arguments.longest, arguments.prompts, endpoint=True),
    )


def run_engine(engine: Engine, work: Work) -> None:
    """Answer everything; keys and values of an earlier run are dropped first, as after every update."""
    engine.new_weights(0)
    engine.submit(work.requests())
    emitted = 0
    while engine.has_work:
        emitted += sum(len(completion.token_ids) for completion in engine.run())
    assert emitted == work.num_tokens


def run_generate(model: PreTrainedModel, work: Work, batch_size: int) -> None:
    for start in range(0, len(work.lengths), batch_size):
        prompts = torch.from_numpy(work.prompts[start : start + batch_size])
        longest = int(work.lengths[start : start + batch_size].max())
        config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest)
        output = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
        assert output.shape[1] == prompts.shape[1] + longest


def measure(name: str, vocabulary: int, arguments: Any) -> dict[str, Any]:
    """One row of the table."""
    model, work = build(name, vocabulary, seed=arguments.seed), make_work(vocabulary, arguments)
    most = int(work.prompts.shape[1] + arguments.longest)
    engines = {slots: Engine(model, max_running=slots, kv_tokens=slots * most) for slots in slot_counts(arguments)}
    ways = {
        "engine": lambda: run_engine(engines[arguments.slots], work),
        "engine_all": lambda: run_engine(engines[arguments.prompts], work),
        "generate_all": lambda: run_generate(model, work, arguments.prompts),
        "generate_slots": lambda: run_generate(model, work, arguments.slots),
    }
    measures = {way: partial(record.seconds, run) for way, run in ways.items()}
    taken = record.interleaved(measures, repeats=arguments.repeats)

    def ratio(way: str, baseline: str) -> dict[str, float]:
        return record.spread(slow / fast for fast, slow in zip(taken[way], taken[baseline], strict=True))

    speeds = {f"{way}_tokens_per_s": record.spread(work.num_tokens / s for s in taken[way]) for way in ways}
    return {
        "model": name,
        "vocabulary": vocabulary,
        "million_parameters": round(sum(p.numel() for p in model.parameters()) / 1e6, 2),
        **speeds,
        "engine / generate_all": ratio("engine", "generate_all"),
        "engine / generate_slots": ratio("engine", "generate_slots"),
        "engine_all / generate_all": ratio("engine_all", "generate_all"),
        "preemptions": engines[arguments.slots].totals.preemptions,
    }


def slot_counts(arguments: Any) -> set[int]:
    return {arguments.slots, arguments.prompts}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=5)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=["quickstart", "5M", "25M"])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[19, 32_000])
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--shortest", type=int, default=32)
    parser.add_argument("--longest", type=int, default=128)
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads)
    start = record.environment()
    rows = []
    for name in arguments.models:
        for vocabulary in arguments.vocabularies:
            rows.append(measure(name, vocabulary, arguments))
            print(record.table(rows[-1:]), file=sys.stderr, flush=True)
    return record.finish("engine_throughput", __doc__, arguments, rows=rows, start=start)


if __name__ == "__main__":
    main()
