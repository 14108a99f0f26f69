"""Tokens a pass of drafting rules on recorded rollouts, epoch by epoch, each with the same number of nodes.

`rhymerl` is the default drafter; `n-gram` reads the request alone; `longest match` is the paper's rule (drafter=paper);
`suffix decoding` is arctic-inference's own code with a tree for each prompt, given the whole budget; `oracle` knows the
answer, and drafts the earlier run of tokens (of the prompt's answers, the request itself or a running sibling's) that
goes on as it does for longest: no path does better.

`courses` says by epoch how much the answers rhyme, and what of `rhymerl`'s drafts with the middle number of nodes was
accepted: `rate` of all nodes, `at 1`, `at 2` ... of the drafts that went so deep those that were right so far, and the
shares of accepted nodes by where they came from.

    pip install --no-deps --target FOLDER arctic-inference
    python -m benchmarks.drafting.draft_rules TRACE [TRACE ...] --arctic FOLDER
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from rhymerl.budgets import PassOutcome
from rhymerl.budgets.fixed import FixedBudget
from rhymerl.config import compose, instantiate
from rhymerl.drafters import Drafter, HistoryTreeDrafter, NGramDrafter
from rhymerl.drafts import Draft, DraftSource, depths
from rhymerl.history.similarity import length_stability, similarity
from rhymerl.history.traces import TraceRecord, read_trace
from rhymerl.runs.replay import Replay
from rhymerl.types import Completion, RolloutRequest

DEPTH = 64  # of arctic-inference's trees
POSITIONS = (1, 2, 4, 8)  # of a draft's tokens
SOURCES = {
    "own": DraftSource.OWN,
    "siblings": DraftSource.SIBLING,
    "others": DraftSource.OTHER,
    "history": DraftSource.HISTORY,
}


class SuffixDecoding(Drafter):
    """arctic-inference's cache (arXiv 2411.04975), one a prompt; a running answer is in it at once, as there."""

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._caches: dict[str, Any] = defaultdict(lambda: SuffixDecodingCache(max_tree_depth=DEPTH))

    def start(self, request: RolloutRequest) -> None:
        self._caches[request.prompt.key].start_request(request.id, request.prompt.token_ids)

    def accept(self, request: RolloutRequest, token_ids: Any, num_accepted: int) -> None:
        self._caches[request.prompt.key].add_active_response(request.id, token_ids)

    def finish(self, completion: Completion) -> None:
        self._caches[completion.request.prompt.key].stop_request(completion.request.id)

    def propose(self, request: RolloutRequest, context: Any, budget: int) -> Draft:
        found = self._caches[request.prompt.key].speculate(
            request.id,
            context,
            max_spec_tokens=budget,
            max_spec_offset=budget,
            min_token_prob=0.0,
            use_tree_spec=True,
        )
        return Draft(token_ids=np.array(found.token_ids, np.int32), parents=np.array(found.parents, np.int32))


class Oracle(Drafter):
    """Given the answers by request id."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers = answers
        self._earlier: dict[str, list[Any]] = defaultdict(list)  # by prompt
        self._running: dict[str, dict[str, Any]] = defaultdict(dict)

    def start(self, request: RolloutRequest) -> None:
        self._running[request.prompt.key][request.id] = request.prompt.token_ids

    def accept(self, request: RolloutRequest, token_ids: Any, num_accepted: int) -> None:
        running = self._running[request.prompt.key]
        running[request.id] = np.append(running[request.id], token_ids)

    def finish(self, completion: Completion) -> None:
        request = completion.request
        del self._running[request.prompt.key][request.id]
        text = np.append(request.prompt.token_ids, self._answers[request.id])
        self._earlier[request.prompt.key].append(text)

    def propose(self, request: RolloutRequest, context: Any, budget: int) -> Draft:
        rest = self._answers[request.id][len(context) - len(request.prompt.token_ids) :][:budget]
        texts = [*self._earlier[request.prompt.key], *self._running[request.prompt.key].values()]
        longest = max(longest_run(text, context[-1], rest) for text in texts)
        return Draft(token_ids=rest[:longest], parents=np.arange(-1, longest - 1, dtype=np.int32))


def longest_run(text: Any, last: int, rest: Any) -> int:
    """The most tokens of `rest` that follow an occurrence of `last` in `text`."""
    positions = np.flatnonzero(text == last) + 1
    length = 0
    while length < len(rest):
        positions = positions[positions + length < len(text)]
        positions = positions[text[positions + length] == rest[length]]
        if len(positions) == 0:
            break
        length += 1
    return length


class CountingBudget(FixedBudget):
    """Counts by epoch what becomes of drafts: `counts[epoch][name]` is how many were accepted, and of how many."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.counts: dict[int, dict[str, Any]] = defaultdict(lambda: defaultdict(lambda: np.zeros(2, np.int64)))

    def learn(self, outcome: PassOutcome) -> None:
        counts = self.counts[int(outcome.requests[0].id.partition("/")[0])]  # a replay's request is "epoch/number"
        drafts, num_accepted = outcome.drafts, outcome.num_accepted
        counts["rate"] += num_accepted.sum(), len(drafts.token_ids)
        deepest = np.zeros(len(drafts), np.int64)
        np.maximum.at(deepest, drafts.requests, depths(drafts))
        for position in POSITIONS:
            counts[f"at {position}"] += (num_accepted >= position).sum(), (deepest >= position).sum()
        sources = np.minimum(drafts.sources[outcome.accepted], DraftSource.HISTORY)
        for name, source in SOURCES.items():
            counts[name] += (sources == source).sum(), len(sources)

    def shares(self) -> dict[str, dict[str, float]]:
        return {
            str(epoch + 1): {name: round(float(part / max(whole, 1)), 3) for name, (part, whole) in counts.items()}
            for epoch, counts in self.counts.items()
        }


def answers_of(records: Iterable[TraceRecord]) -> dict[str, Any]:
    """By the request ids that a replay gives them."""
    epochs = groupby(sorted(records, key=lambda each: each.epoch), lambda each: each.epoch)
    return {f"{epoch}/{number}": each.response_tokens for epoch, group in epochs for number, each in enumerate(group)}


def measured(trace: Path, arguments: Any) -> list[dict[str, Any]]:
    records, name = list(read_trace(trace)), trace.stem.partition(".")[0]
    rules: dict[str, Callable[[], Drafter]] = {
        "rhymerl": lambda: HistoryTreeDrafter(deterministic=True),
        "n-gram": NGramDrafter,
        "longest match": lambda: instantiate(compose("replay", ["trace=x", "drafter=paper"]).drafter, key="drafter"),
        "oracle": lambda: Oracle(answers_of(records)),
    }
    if arguments.arctic is not None:
        rules["suffix decoding"] = SuffixDecoding
    rows = []
    for nodes in arguments.nodes:
        for rule, make in rules.items():
            drafter = make()
            totals = Replay(drafter, FixedBudget(nodes), max_running=arguments.max_running).run(records)
            drafter.close()
            epochs = by_epoch({epoch: each.result()["tokens_per_pass"] for epoch, each in totals.items()})
            later = [each for epoch, each in totals.items() if epoch > min(totals)]
            overall = sum(each.tokens for each in later) / sum(each.request_passes for each in later)
            rows.append({"trace": name, "rule": rule, "nodes": nodes, "later epochs": round(overall, 3), **epochs})
            record.note_row(rows[-1])
    return rows


def course(trace: Path, arguments: Any) -> dict[str, Any]:
    """How much the answers of a trace rhyme, and what of our drafts is accepted, by epoch."""
    records = list(read_trace(trace))
    lengths = length_stability(records)
    drafter = HistoryTreeDrafter(deterministic=True)
    budget = CountingBudget(sorted(arguments.nodes)[len(arguments.nodes) // 2])
    Replay(drafter, budget, max_running=arguments.max_running).run(records)
    drafter.close()
    return {
        "accepted": budget.shares(),
        "similarity": by_epoch(similarity(records).by_epoch),
        "length_same_group": by_epoch(lengths.same_group_by_epoch),
        "length_spearman": by_epoch(lengths.spearman_by_epoch),
        "tokens_per_answer": round(float(np.mean([len(each.response_tokens) for each in records])), 1),
    }


def by_epoch(values: Mapping[int, float]) -> dict[str, float]:
    return {str(epoch + 1): round(value, 3) for epoch, value in values.items()}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, nodes=[4, 8, 16], max_running=36, arctic=Path)
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    arguments = record.begin(parser, words)
    if arguments.arctic is not None:
        sys.path.append(str(arguments.arctic))
    rows = [row for trace in arguments.traces for row in measured(trace, arguments)]
    courses = {trace.stem.split(".")[0]: course(trace, arguments) for trace in arguments.traces}
    arguments.arctic, arguments.traces = arguments.arctic is not None, list(courses)
    return record.finish("draft_rules", __doc__, arguments, rows=rows, courses=courses)


if __name__ == "__main__":
    main()
