"""Tokens per second of transformers' continuous batching (`generate_batch`: paged attention, CUDA graphs).

The same policy, prompts and lengths as there. The second of two calls counts, for which the graphs of the first are
kept.

    python -m benchmarks.gpu.peer --running 8 32 128
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks import record
from benchmarks.gpu.bare import options, policy_of, requests
from benchmarks.gpu.device_time import sync
from benchmarks.gpu.peaked_policy import PROMPT_TOKENS

BLOCK_TOKENS = 256  # of its cache, if nothing is said


def measure(arguments: Any, size: str, running: int) -> dict[str, Any]:
    policy = policy_of(size, arguments.dtype, arguments.seed)
    model = policy.model
    prompts = [each.prompt.token_ids.tolist() for each in requests(policy, running, arguments, "peer")]
    generation = GenerationConfig(
        max_new_tokens=arguments.tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=-1,
        pad_token_id=0,
    )
    blocks = -(-(PROMPT_TOKENS + arguments.tokens) // BLOCK_TOKENS)
    batching = ContinuousBatchingConfig(
        num_blocks=running * blocks + 8,  # else a share of the memory, which a CPU would fill with zeros
        max_batch_tokens=max(running * PROMPT_TOKENS, 256),
        max_requests_per_batch=running,
        seed=arguments.seed,
    )
    for _ in range(2):
        sync()
        began = time.perf_counter()
        done = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching, persistent_manager=True
        )
        seconds = time.perf_counter() - began
    model.destroy_cached_continuous_batching_manager()
    lengths = [len(each.generated_tokens) for each in done.values()]
    if lengths != [arguments.tokens] * running:  # it logs its errors and returns
        raise SystemExit(
            f"generate_batch: {running} answers of {arguments.tokens} tokens were asked for, and these came: {lengths}"
        )
    return {"peer": "transformers.generate_batch", "tokens_per_s": round(sum(lengths) / seconds, 1)}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = record.begin(options(__doc__, running=[8, 32, 128]), words)
    cases = record.cases(size=[arguments.size], running=arguments.running)
    return record.finish("gpu_peer", __doc__, arguments, rows=record.rows_of(cases, partial(measure, arguments)))


if __name__ == "__main__":
    main()
