"""The link between SGLang's running batch and a rhymerl drafter.

It calls the same hooks, in the same order, as our own engine does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field, replace

import numpy as np

from rhymerl.backends.remote.drafter_feed import Counters, FeedReader
from rhymerl.backends.remote.wire import feed_of
from rhymerl.backends.sglang.plugin.arrays import TreeArrays, tree_arrays
from rhymerl.backends.sglang.plugin.rows import EngineRequest, EngineRow
from rhymerl.budgets.base import Budget, PassOutcome
from rhymerl.drafters.base import Drafter
from rhymerl.drafts import DraftBatch, no_drafts
from rhymerl.engine.protocol import DraftingProtocol
from rhymerl.engine.walk import walk
from rhymerl.errors import BackendError
from rhymerl.history import NO_VERSION, HistoryDelta
from rhymerl.types import RolloutRequest

_log = logging.getLogger(__name__)
_NOTHING_NEW = HistoryDelta(version=NO_VERSION, is_snapshot=False, changes=())
_SOME = 1  # requests that wait: whether there are any is not known here
_REPORT_EVERY = 1024  # passes that a budget is told of: it keeps them until it is asked for its metrics


@dataclass(slots=True, kw_only=True)
class VerifiedPass:
    """A launched pass: its requests [R], their drafts, and the nodes computed for each, padding included."""

    rows: Sequence[EngineRow]
    drafts: DraftBatch
    width: int
    started: float  # when all tokens before it were known
    is_alone: bool = True  # nothing else ran until its own were
    _ends: list[int] = field(init=False)  # of each row's tokens before it

    def __post_init__(self) -> None:
        self._ends = [row.end for row in self.rows]

    def outcome(self, known: float) -> PassOutcome:
        """Return the outcome once tokens are in the rows, since `known`; requests put back in the queue have none."""
        drafts, num_rows = self.drafts, len(self.rows)
        sampled = [row.tokens[end : row.end] for row, end in zip(self.rows, self._ends, strict=True)]
        return PassOutcome(
            requests=[row.request for row in self.rows],
            drafts=drafts,
            **walk(drafts, sampled)._asdict(),
            num_tokens=num_rows * (1 + self.width),
            num_rows=num_rows,
            seconds=known - self.started if self.is_alone else None,
            is_decoding=self.is_alone,
            num_padding=num_rows * self.width - len(drafts.token_ids),
        )


@dataclass(eq=False)
class EngineDrafting:
    """Drafts by the protocol for SGLang's running batch: trees of one size per pass, rooted at a request's last token.

    The budget's `widths` are the numbers of nodes of a request, by default none and its most. A pass has the smallest
    that holds its largest draft.
    """

    drafter: Drafter
    budget: Budget
    _: KW_ONLY
    vocabulary: int
    feed: FeedReader | None = None
    counters: Counters | None = None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.protocol = DraftingProtocol(self.drafter, self.budget, vocabulary=self.vocabulary)
        self._widths = (self.budget.widths or (0, self.budget.max_nodes)) if self.protocol.max_nodes else (0,)
        self._rows: dict[int, EngineRow] = {}  # by the identity of the engine's request: names come again
        self._verified: VerifiedPass | None = None  # the pass before, if the budget wants to hear of it
        self._is_skipped = False  # the drafter is left alone in the pass under way
        self._num_learned = 0

    @property
    def n(self) -> int:
        return 1 + self.budget.max_nodes

    def propose(
        self, requests: Sequence[EngineRequest], ahead: Callable[[], Sequence[Sequence[int]]]
    ) -> TreeArrays | None:
        """Return the trees of the batch, None for a pass without drafts.

        `ahead()` waits for the pass before and returns each request's sampled tokens that its `output_ids` lack yet.
        Where the drafter is left alone it is not called.
        """
        rows = self._running(requests)
        started = None
        if self._verified is not None:
            started = self._follow(rows, ahead)
            self._learn(self._verified, started)
        self._is_skipped = self.protocol.is_skipped(len(rows))
        if self._is_skipped:
            drafts = no_drafts(len(rows))
        else:
            started = self._follow(rows, ahead) if started is None else started
            drafts = self._drafts(rows)
        width = self._width(drafts)
        if self.protocol.hears_outcomes and not self._is_skipped and started is not None:
            self._verified = VerifiedPass(rows=rows, drafts=drafts, width=width, started=started)
        for row in rows:
            row.num_passes += 1
        self._count(passes=1, row_passes=len(rows), nodes=width * len(rows), drafted_nodes=len(drafts.token_ids))
        arrays = None
        if width:
            arrays = tree_arrays(drafts, np.array([row.last for row in rows], np.int64), 1 + width)
        if started is not None:
            self._count(draft_s=self.clock() - started)
        return arrays

    def _running(self, requests: Sequence[EngineRequest]) -> list[EngineRow]:
        keys = [id(request) for request in requests]
        known = [row for key in keys if (row := self._rows.get(key)) is not None]
        if len(known) == len(keys) == len(self._rows):  # as in most passes: nobody has come or gone
            return known
        here = set(keys)
        self._finish_departed(here)
        return [self._row(request, here) for request in requests]

    def _follow(self, rows: Sequence[EngineRow], ahead: Callable[[], Sequence[Sequence[int]]]) -> float:
        """Take up what was sampled; return when it was known."""
        new = ahead()
        known = self.clock()
        for row, tokens in zip(rows, new, strict=True):
            row.follow(tokens)
            self._tell(row)
        return known

    def _learn(self, verified: VerifiedPass, known: float) -> None:
        self._verified = None
        self.protocol.learn_outcome(verified.outcome(known))
        self._num_learned += 1
        if self._num_learned % _REPORT_EVERY == 0:
            self.budget.metrics()

    def _width(self, drafts: DraftBatch) -> int:
        """Return the width of a pass; tests schedule it."""
        largest = int(drafts.counts.max(initial=0))
        return next(width for width in self._widths if width >= largest)

    def note_other_pass(self) -> None:
        """Note that the engine reads prompts: the time of the pass before will not be known."""
        if self._verified is not None:
            self._verified.is_alone = False

    def catch_up(self) -> None:
        """Called once the pass of the trees is launched."""
        if not self._is_skipped:
            self.protocol.catch_up()

    def _row(self, engine_request: EngineRequest, here: Set[int]) -> EngineRow:
        row = self._rows.get(id(engine_request))
        if row is None:
            row = EngineRow.of(engine_request, self.n)
            row.request = self._named_apart(row.request, here)
            self._rows[id(engine_request)] = row
            if self.feed is not None:
                self._catch_up(self.feed, feed_of(engine_request.sampling_params.custom_params))
            self.protocol.start(row.request)
        return row

    def _catch_up(self, feed: FeedReader, version: int) -> None:
        """Read the feed as far as there is something.

        Drafts from what is known are good for any request, whatever its client has written.
        """
        try:
            feed.catch_up(version)
        except BackendError as error:
            _log.error("rhymerl: %s; drafts come from what is known until then", error)

    def _named_apart(self, request: RolloutRequest, here: Set[int]) -> RolloutRequest:
        """Return the request under a name that no other row has: two trainers may give the same name.

        Drafters know requests by their names. A namesake that is not in the batch was put back into the queue. It is
        finished: it was taken away there before this one was sent, or else starts anew when it is back.
        """
        rows = {row.request.id: key for key, row in self._rows.items()}
        name = request.id
        while (namesake := rows.get(name)) in here:
            name += "'"
        if namesake is not None:
            self._finish(namesake)
        return request if name == request.id else replace(request, id=name)

    def _tell(self, row: EngineRow) -> None:
        """Call `accept` for tokens sampled since: each pass draws one token, and all others came from drafts."""
        new = row.length - row.num_told
        if new > 0 and self.protocol.hears_tokens:
            drafted = max(row.end - row.num_told - row.num_passes, 0)
            self.protocol.accept(row.request, row.tokens[row.num_told : row.length], min(drafted, new))
        row.num_told, row.num_passes = row.length, 0

    def _drafts(self, rows: Sequence[EngineRow]) -> DraftBatch:
        room = np.array([row.room for row in rows], np.int32)
        askers = np.flatnonzero(room > 1)
        if self.protocol.max_nodes == 0 or len(askers) == 0:
            return no_drafts(len(rows))
        asking = [rows[i] for i in askers.tolist()]
        protocol, requests = self.protocol, [row.request for row in asking]
        generated = np.array([row.num_generated for row in asking], np.int64)
        limits = protocol.limits(requests, generated, num_waiting=_SOME)
        if not limits.all():
            asked = np.flatnonzero(limits)
            if len(asked) == 0:
                return no_drafts(len(rows))
            askers, limits = askers[asked], limits[asked]
            asking = [asking[i] for i in asked.tolist()]
            requests = [row.request for row in asking]
        before = protocol.num_asked, protocol.num_hits, protocol.num_malformed
        drafts = protocol.propose(requests, [row.context for row in asking], limits, room[askers])
        asks, hits, bad = protocol.num_asked, protocol.num_hits, protocol.num_malformed
        self._count(asks=asks - before[0], hits=hits - before[1], bad_drafts=bad - before[2])
        return drafts.scatter(askers, len(rows))

    def flush(self) -> None:
        """Forget all requests: the engine is empty, and so is its queue.

        New weights are coming. Where no trainer tells of its history, a step is over: the drafter hears that nothing is
        new in it.
        """
        self._verified = None
        for key in list(self._rows):
            self._finish(key)
        if self.feed is None or self.feed.version == 0:
            self.protocol.follow(_NOTHING_NEW)

    def _finish_departed(self, here: Set[int]) -> None:
        """Finish the requests that have left the batch and have ended; others were only put back into the queue."""
        for key in [key for key, row in self._rows.items() if key not in here and row.engine_request.finished()]:
            self._finish(key)

    def _finish(self, key: int) -> None:
        row = self._rows.pop(key)
        row.follow(())
        self._tell(row)
        self.protocol.finish(row.completion())

    def _count(self, **amounts: float) -> None:
        if self.counters is not None:
            self.counters.add(**amounts)


def not_yet_known(
    requests: Sequence[EngineRequest], cached: Sequence[int], sampled: Callable[[], Sequence[Sequence[int]]]
) -> Sequence[Sequence[int]]:
    """Return the tokens that the last pass has sampled for each request and that are not in its output yet.

    Results are read a pass later. `cached` tokens of each request have keys and values: all but its last one. `sampled`
    is only called when some are missing.
    """
    missing = [
        length + 1 - len(request.origin_input_ids) - len(request.output_ids)
        for request, length in zip(requests, cached, strict=True)
    ]
    if not any(missing):
        return [()] * len(missing)
    return [line[:count] for line, count in zip(sampled(), missing, strict=True)]
