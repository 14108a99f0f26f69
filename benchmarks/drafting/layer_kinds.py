"""Passes of models whose layers need other things of the past than all keys: recurrent states, and windows.

`hybrid` is a model of Qwen3.5's layers (three gated delta nets to one of full attention), `llama` one of that size,
both with random weights in float32. They decode the same requests in turn, with 8 drafted nodes of each, of which half
are right, and without drafts. `ratio` is a pass with nodes over one without. `over llama` is that ratio over the
Llama's, the overhead of states: those of the nodes, and what it takes to advance a row by those that were accepted. The
rows of `windows` are a small model of Mistral's layers that decodes long answers with a window and without: the most
slots of keys and values that its requests and prompts hold at a time.

    python -m benchmarks.drafting.layer_kinds [--rows 1 8 32] [--answers 512 1024 2048]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from benchmarks import record
from rhymerl.budgets import FixedBudget
from rhymerl.drafters import Drafter, NoDrafter
from rhymerl.drafts import Draft
from rhymerl.engine.engine import Engine
from rhymerl.models.policy import PolicySource
from rhymerl.testing import OracleDrafter, make_requests
from rhymerl.types import IntArray, RolloutRequest

NODES = 8
PROMPT_TOKENS = 64
WIDE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
DELTA_NETS = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MODELS = {
    "llama": {**WIDE, "model_type": "llama", "intermediate_size": 2048},
    "hybrid": {**WIDE, **DELTA_NETS, "model_type": "qwen3_5_text", "intermediate_size": 1152},
}
SMALL = {**WIDE, "model_type": "mistral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


class HalfRight(OracleDrafter):
    """Drafts a path whose first half is the answer, and the rest is not."""

    def propose(self, request: RolloutRequest, context: IntArray, budget: int) -> Draft:
        draft = super().propose(request, context, budget)
        wrong = np.arange(len(draft.token_ids)) >= NODES // 2
        tokens = np.where(wrong, (draft.token_ids + 1) % WIDE["vocab_size"], draft.token_ids).astype(np.int32)
        return Draft(token_ids=tokens, parents=draft.parents)


def decode(model: PreTrainedModel, requests: Sequence[RolloutRequest], drafter: Drafter) -> dict[str, Any]:
    """Return the `answers` by request, the `ms` of a pass (median behind the prefill), and the most `slots` held."""
    room = len(requests) * (2 * PROMPT_TOKENS + requests[0].sampling.max_tokens + 2 * NODES)
    engine = Engine(model, drafter=drafter, budget=FixedBudget(NODES), max_running=len(requests), kv_tokens=room)
    engine.submit(requests)
    answers, seconds, slots = {}, [], 0
    with engine.forward.ready():
        while engine.has_work:
            started = perf_counter()
            answers.update({each.request.id: each.output.token_ids for each in engine.step()})
            seconds.append(perf_counter() - started)
            slots = max(slots, engine.kv.num_slots - engine.kv.pool.num_free)
    return {"answers": answers, "ms": 1e3 * float(np.median(seconds[2:])), "slots": slots, "passes": len(seconds)}


def requests_of(rows: int, tokens: int, seed: int) -> list[RolloutRequest]:
    lengths, vocabulary = (PROMPT_TOKENS, PROMPT_TOKENS), WIDE["vocab_size"]
    return make_requests(
        rows, vocabulary=vocabulary, prompt_tokens=lengths, seed=seed, stop_token_ids=(), max_tokens=tokens
    )


def states(rows: int, *, seed: int, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row a model; the first one is what the other is compared with."""
    requests = requests_of(rows, tokens, seed)
    models = {name: PolicySource(init=init, seed=seed).load().model.eval() for name, init in MODELS.items()}
    plain = {name: decode(model, requests, NoDrafter())["answers"] for name, model in models.items()}
    ways = {}
    for name, model in models.items():
        ways[f"{name} plain"] = partial(decode, model, requests, NoDrafter())
        ways[f"{name} drafted"] = partial(decode, model, requests, HalfRight(plain[name]))
    found = record.interleaved(ways, repeats=repeats)
    table, of_llama = [], np.ones(repeats)
    for name, model in models.items():
        without, drafted = (np.array([each["ms"] for each in found[f"{name} {way}"]]) for way in ("plain", "drafted"))
        ratio = drafted / without
        of_llama = ratio if name == "llama" else of_llama
        row = {"model": name, "million": round(model.num_parameters() / 1e6, 1), "rows": rows}
        row |= {"plain_ms": record.spread(without), "drafted_ms": record.spread(drafted)}
        row |= {"tokens a pass": round(tokens / found[f"{name} drafted"][0]["passes"], 2)}
        table.append(row | {"ratio": record.spread(ratio), "over llama": record.spread(ratio / of_llama)})
    return table


def keys(answer: int, *, window: int, rows: int, seed: int) -> dict[str, Any]:
    """Return the most slots with the window and without."""
    requests, row = requests_of(rows, answer, seed), {"model": "windows", "rows": rows, "answer": answer}
    for name, size in (("without", None), ("with", window)):
        model = PolicySource(init={**SMALL, "sliding_window": size}, seed=seed).load().model.eval()
        row[f"slots {name}"] = decode(model, requests, NoDrafter())["slots"]
    return {**row, "window": window}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=5, rows=[1, 8, 32], tokens=60, answers=[512, 1024, 2048], window=128)
    arguments = record.begin(parser, words)
    rows, seed = [], arguments.seed
    for count in arguments.rows:
        rows += states(count, seed=seed, tokens=arguments.tokens, repeats=arguments.repeats)
    rows += [keys(each, window=arguments.window, rows=8, seed=seed) for each in arguments.answers]
    return record.finish("layer_kinds", __doc__, arguments, rows=rows)


if __name__ == "__main__":
    main()
