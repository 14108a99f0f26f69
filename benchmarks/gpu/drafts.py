"""Tokens a second of the embedded engine without drafts and with drafts from two epochs of answers to the same prompts.

Both modes answer the same requests after rounds that are not counted, in which CUDA graphs are captured.
`equal_answers` is the share of answers that are those without drafts, token for token: all of them in float64, and
fewer in bfloat16, where passes of other shapes are rounded in other ways.

    python -m benchmarks.gpu.drafts --running 8 32 128
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from typing import Any

from benchmarks import record
from benchmarks.gpu.bare import answers, options, policy_of, requests, sample, share_equal
from rhymerl.budgets import FixedBudget
from rhymerl.drafters import Drafter, HistoryTreeDrafter, NoDrafter
from rhymerl.engine.engine import Engine
from rhymerl.engine.totals import EngineTotals
from rhymerl.history import HistoryStore
from rhymerl.history.answers import answers_of
from rhymerl.types import Completion

EPOCHS = 2
ROUNDS = ("first", "second", "third", "measured")  # where passes have other numbers of tokens, graphs are captured
DRAFTERS: Mapping[str, type[Drafter]] = {"none": NoDrafter, "history_tree": HistoryTreeDrafter}


class Rollouts:
    """The policy, and the history from which it drafts."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.policy = policy_of(arguments.size, arguments.dtype, arguments.seed)
        self.history = HistoryStore(window=EPOCHS)
        largest = max(arguments.running)
        engine = Engine(self.policy.model, max_running=largest)
        for epoch in range(EPOCHS):
            done = answers(engine, requests(self.policy, largest, arguments, f"epoch {epoch}"))
            for prompt, group in answers_of([sample(each) for each in done], epoch):
                self.history.add(prompt, group)
        self.plain: dict[int, list[Completion]] = {}  # without drafts, by running requests

    def measure(self, running: int, mode: str) -> dict[str, Any]:
        done, seconds, totals = self.answered(running, mode)
        if mode == "none":
            self.plain[running] = done
        plain = self.plain.get(running)  # not there where its row is from before
        equal = {} if plain is None else {"equal_answers": share_equal(done, plain)}
        return {
            "tokens_per_s": round(totals.emitted_tokens / seconds, 1),
            "accept_length": round(totals.emitted_tokens / totals.request_passes, 3),
            "pass_ms": round(1e3 * totals.busy_s / totals.passes, 3),
            "accepted_from_history": totals.accepted_history,
            "draft_time_frac": round(totals.draft_s / totals.busy_s, 4),
            **equal,
        }

    def answered(self, running: int, mode: str) -> tuple[list[Completion], float, EngineTotals]:
        """Return the answers, seconds and totals of the last round; in each the drafter knows only the history."""
        with closing(DRAFTERS[mode]()) as drafter:
            budget = FixedBudget(self.arguments.nodes)
            engine = Engine(self.policy.model, drafter=drafter, budget=budget, max_running=running)
            for name in ROUNDS:
                asked = requests(self.policy, running, self.arguments, name)
                drafter.follow(self.history.snapshot())
                before, began = replace(engine.totals), time.perf_counter()
                done = answers(engine, asked)
                seconds = time.perf_counter() - began
            return done, seconds, engine.totals.minus(before)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = record.begin(options(__doc__, running=[8, 32, 128], nodes=16), words)
    rollouts = cache(partial(Rollouts, arguments))  # not made where all rows are known
    cases = record.cases(size=[arguments.size], running=arguments.running, mode=DRAFTERS)
    rows = record.rows_of(cases, lambda size, running, mode: rollouts().measure(running, mode))
    return record.finish("gpu_drafts", __doc__, arguments, rows=rows)


if __name__ == "__main__":
    main()
