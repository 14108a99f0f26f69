"""The measured gain of drafts by a budget's costs: the time of passes since the last metrics, with and without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rhymerl.budgets.timeline import PlainPasses, rows_of, starts_of
from rhymerl.costs import PassCost
from rhymerl.types import FloatArray, IndexArray, Ratio, RolloutRequest


@dataclass(slots=True)
class _Span:
    """The passes of a request since the last metrics; the turns of an episode are those of one request."""

    start: int | None = None  # of the turn that runs
    turns: list[tuple[int, int]] = field(default_factory=list)  # that are over: starts and ends
    saved: int = 0  # passes that it would have needed more without drafts

    def until(self, now: int) -> list[tuple[int, int]]:
        """Return all turns; one that runs ends now."""
        return self.turns if self.start is None else [*self.turns, (self.start, now)]


@dataclass(slots=True)
class PassTotals:
    """The passes since the last metrics."""

    num_passes: int = 0
    begun: int = 0  # of these, those that are not counted by size yet
    # Of these, each that the budget was told of: rows, nodes, requests that were asked, tokens of prompts, keys seen.
    asked: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    # The requests of each pass with drafts, and their accepted nodes [R].
    saved: list[tuple[Sequence[RolloutRequest], IndexArray]] = field(default_factory=list)
    spans: dict[str, _Span] = field(default_factory=dict)  # by request id, as they entered
    # By the size of the batch: passes, the sum of their rows, and of those that asked how many there were, and as how
    # many without drafts they took and made.
    sizes: dict[int, FloatArray] = field(default_factory=dict)

    def next(self) -> PassTotals:
        """Return those of the time that begins now: what runs goes on."""
        running = {name: _Span(start=0) for name, span in self.spans.items() if span.start is not None}
        return PassTotals(spans=running)

    def enter(self, request: RolloutRequest) -> None:
        self.spans.setdefault(request.id, _Span()).start = self.num_passes

    def leave(self, request: RolloutRequest) -> None:
        span = self.spans.get(request.id, _Span())
        span.turns, span.start = span.until(self.num_passes), None

    def begin(self, rows_before: int, rows: int) -> None:
        """Begin a pass over `rows` requests, the latest so far; the passes before were over `rows_before`."""
        for count, size in ((self.begun - 1, rows_before), (1, rows)):
            if count > 0:
                self._size(size)[:2] += count, count * size
        self.begun = 0

    def count(self, rows: int, *, made: float, taken: float) -> None:
        """A pass for which requests were asked took as long, and made tokens, as so many without drafts."""
        self._size(rows)[2:] += 1, taken, made

    def _size(self, rows: int) -> FloatArray:
        return self.sizes.setdefault(rows.bit_length(), np.zeros(5))

    def regret(self, cost: PassCost, gain: Callable[[int], float]) -> Ratio:
        """Return the share of time that the best choice per batch size would have saved: all drafts, or none.

        The gain of drafts is the measured one; without drafts it is `gain` of a batch of that size.
        """
        lost = whole = 0.0
        for passes, rows, asked, taken, made in self.sizes.values():
            if not passes:
                continue
            mean = max(round(rows / passes), 1)
            drafts = made / taken if asked else gain(mean)
            times = passes - asked + taken
            had = (passes - asked + made) / times
            seconds = times * float(cost.seconds(mean, np.zeros(1), 0)[0])
            lost, whole = lost + seconds * max(1 - had / max(drafts, 1.0), 0.0), whole + seconds
        return Ratio(lost, whole)

    @property
    def num_nodes(self) -> int:
        return sum(nodes for _, nodes, *_ in self.asked)

    def speedup(self, cost: PassCost) -> Ratio:
        """Return the time without drafts over the time with them, by the cost of passes.

        Without drafts each request takes a pass more for each accepted node, so that it ends later. What runs beside it
        then follows from all of them, as in an engine that lets requests in when there is room.
        """
        for requests, accepted in self.saved:
            for request, saved in zip(requests, accepted.tolist(), strict=True):
                if request.id in self.spans:
                    self.spans[request.id].saved += saved
        turns = [each.until(self.num_passes) for each in self.spans.values()]
        starts, ends = np.array([turn for each in turns for turn in each], np.int64).reshape(-1, 2).T
        rows = rows_of(starts, ends - starts)
        more = np.array([each.saved for each in self.spans.values()], np.int64)
        lengths = np.array([sum(end - start for start, end in each) for each in turns], np.int64) + more
        longer = rows_of(starts_of(lengths, int(rows.max(initial=1))), lengths)
        told, nodes, asked, prompts, seen = np.array(self.asked, np.int64).reshape(-1, 5).T
        by_rows = seen * told / np.maximum(told + nodes, 1)
        plain = cost.seconds(told, 0 * told, 0 * told, seen=by_rows)
        drafting = float((cost.seconds(told, nodes, asked, prompt_tokens=prompts, seen=seen) - plain).sum())
        reading = float((cost.seconds(told, 0 * told, 0 * told, prompt_tokens=prompts, seen=by_rows) - plain).sum())
        context = float(seen.sum()) / max(int((told + nodes).sum()), 1)  # keys of a row, on average
        without, had = (PlainPasses(each, context * each.astype(np.float64)).seconds(cost) for each in (longer, rows))
        return Ratio(without + reading, had + drafting)
