"""The engine's part of the drafting protocol: limits by its slots, and acceptance counts. E = emitting rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rhymerl.budgets.base import PassOutcome
from rhymerl.compiled import compiled
from rhymerl.drafts import DraftBatch, DraftSource, no_drafts
from rhymerl.engine.layout import PassLayout
from rhymerl.engine.protocol import DraftingProtocol
from rhymerl.engine.rows import Rows
from rhymerl.engine.speedup import is_due_plain
from rhymerl.engine.totals import NUM_DEPTHS, EngineTotals
from rhymerl.engine.verify import Verification
from rhymerl.types import BoolArray, Completion, IndexArray, IntArray, RolloutRequest

_RUN_AHEAD, _HISTORY = int(DraftSource.RUN_AHEAD), int(DraftSource.HISTORY)


class Drafting:
    """The drafts of an engine's passes; there are none without a drafter or with an empty budget."""

    def __init__(
        self, protocol: DraftingProtocol, rows: Rows, totals: EngineTotals, *, now: Callable[[], float]
    ) -> None:
        self.protocol = protocol
        self._rows = rows
        self._totals = totals
        self._now = now
        self._requests: list[RolloutRequest] = []  # of the rows that emit in the pass under way
        self._is_skipped = True  # the drafter is left alone in it
        self.num_asked = 0  # requests for which the drafter was asked in it
        self._seconds = 0.0  # that drafts took of it: all calls of the protocol
        self._policy_version = self._pass_number = 0
        self._nothing = no_drafts(0)

    def begin_rollout(self, policy_version: int) -> None:
        """Nothing is running, or the policy has changed."""
        self._policy_version, self._pass_number = policy_version, 0

    def start(self, requests: Iterable[RolloutRequest]) -> None:
        """Requests enter."""
        started = self._now()
        for request in requests:
            self.protocol.start(request)
        self._seconds += self._now() - started

    def finish(self, completion: Completion) -> None:
        """A request has ended."""
        started = self._now()
        self.protocol.finish(completion)
        self._seconds += self._now() - started

    def take_seconds(self) -> float:
        """Return what drafts have taken since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def ask(self, row: IndexArray, *, spare: int, num_waiting: int) -> DraftBatch:
        """Return drafts to verify below rows `row` [E], at most `spare` nodes in all; `num_waiting` requests wait."""
        started = self._now()
        drafts = self._drafts(row, spare, num_waiting)
        seconds = self._now() - started
        self._seconds += seconds
        if not self._is_skipped:
            self._totals.draft_s += seconds
        return drafts

    def _drafts(self, row: IndexArray, spare: int, num_waiting: int) -> DraftBatch:
        self._is_skipped, self.num_asked = self.protocol.is_skipped(len(row)), 0
        self._pass_number += 1
        if not self._is_skipped or self.protocol.hears_tokens:
            self._requests = [request for each in row.tolist() if (request := self._rows.request[each]) is not None]
        if self._is_skipped:
            return self._no_drafts(len(row))
        rows = self._rows
        generated = rows.length[row] - rows.prompt_length[row]
        limits = self.protocol.limits(self._requests, generated, num_waiting=num_waiting)
        if is_due_plain(self._policy_version, self._pass_number):
            limits[:] = 0
        _fit(limits, row, rows.length, rows.limit, rows.context, self.protocol.max_nodes, max(spare, 0))
        askers, num_rows, requests = np.flatnonzero(limits), len(row), self._requests
        self.num_asked = len(askers)
        if not len(askers):
            return self._no_drafts(num_rows)
        if len(askers) < num_rows:
            row, limits, requests = row[askers], limits[askers], [requests[asker] for asker in askers.tolist()]
        return self._proposed(row, requests, limits).scatter(askers, num_rows)

    def _proposed(self, row: IndexArray, requests: Sequence[RolloutRequest], limits: IntArray) -> DraftBatch:
        protocol, rows, totals = self.protocol, self._rows, self._totals
        drafts = protocol.propose(requests, rows.contexts_of(row), limits, rows.limit[row] - rows.length[row])
        totals.asks, totals.hits, totals.bad_drafts = protocol.num_asked, protocol.num_hits, protocol.num_malformed
        return drafts

    def catch_up(self) -> None:
        """The pass is launched; what the drafter does until it is over takes no time of it."""
        if not self._is_skipped:
            self.protocol.catch_up()

    def _no_drafts(self, num_rows: int) -> DraftBatch:
        if len(self._nothing) != num_rows:
            self._nothing = no_drafts(num_rows)
        return self._nothing

    def tell(self, layout: PassLayout, verified: Verification, *, seconds: float) -> None:
        """Count what was accepted, and let drafter and budget know; before finished rows leave."""
        started = self._now()
        self._tell(layout, verified, seconds)
        self._seconds += self._now() - started

    def _tell(self, layout: PassLayout, verified: Verification, seconds: float) -> None:
        if len(layout.node_index):
            self._count(layout, verified)
        if self.protocol.hears_tokens:
            ends = np.cumsum(verified.num_emitted)
            starts, ends = (ends - verified.num_emitted).tolist(), ends.tolist()
            for request, start, end, accepted in zip(
                self._requests, starts, ends, verified.num_accepted.tolist(), strict=True
            ):
                self.protocol.accept(request, verified.token[start:end], accepted)
        if self.protocol.hears_outcomes and not self._is_skipped:
            self.protocol.learn_outcome(_outcome(self._requests, layout, verified, seconds))

    def _count(self, layout: PassLayout, verified: Verification) -> None:
        totals, drafts = self._totals, layout.drafts
        by_depth, by_source = np.zeros((2, NUM_DEPTHS), np.int64), np.zeros(7, np.int64)
        _tally(
            drafts.starts,
            layout.node_depth,
            drafts.sources,
            verified.accepted,
            verified.num_accepted,
            by_depth,
            by_source,
        )
        own, sibling, run_ahead, other, history, ages, drafted_run_ahead = by_source.tolist()
        totals.drafts_to_depth = totals.drafts_to_depth + by_depth[0]
        totals.accepted_to_depth = totals.accepted_to_depth + by_depth[1]
        totals.drafted_nodes += len(drafts.parents)
        totals.accepted_nodes += int(verified.num_accepted.sum())
        totals.drafted_run_ahead += drafted_run_ahead
        totals.accepted_own += own
        totals.accepted_sibling += sibling
        totals.accepted_run_ahead += run_ahead
        totals.accepted_other += other
        totals.accepted_history += history
        totals.accepted_age_epochs += ages


@compiled
def _fit(
    limits: IntArray, row: IndexArray, length: IndexArray, limit: IndexArray, context: int, most: int, spare: int
) -> None:
    """Cut `limits` [E] to what fits into the context, before the last token, and in all into `spare`."""
    total, askers = 0, 0
    for e in range(len(limits)):
        at = length[row[e]]
        fits = min(most, context - at) if limit[row[e]] - at > 1 else 0
        limits[e] = max(min(limits[e], fits), 0)
        total += limits[e]
        askers += limits[e] > 0
    if total > spare:
        for e in range(len(limits)):
            limits[e] = min(limits[e], spare // askers)


@compiled
def _tally(
    starts: IndexArray,
    depth: IndexArray,
    sources: npt.NDArray[np.int8],
    accepted: BoolArray,
    num_accepted: IndexArray,
    by_depth: IndexArray,
    by_source: IndexArray,
) -> None:
    """Count into by_depth[0, d] the drafts deeper than d, into by_depth[1, d] those accepted that far.

    `by_source` is laid out as `_count` reads it.
    """
    for r in range(len(num_accepted)):
        deepest = 0
        for node in range(starts[r], starts[r + 1]):
            deepest = max(deepest, depth[node])
            by_source[6] += sources[node] == _RUN_AHEAD
            if accepted[node]:
                if sources[node] >= _HISTORY:
                    by_source[_HISTORY] += 1
                    by_source[5] += sources[node] - _HISTORY
                elif sources[node] >= 0:
                    by_source[sources[node]] += 1
        for d in range(by_depth.shape[1]):
            by_depth[0, d] += deepest > d
            by_depth[1, d] += num_accepted[r] > d


def _outcome(
    requests: Sequence[RolloutRequest], layout: PassLayout, verified: Verification, seconds: float
) -> PassOutcome:
    drafts, reached = layout.drafts, verified.accepted
    if len(layout.node_index):
        reached = verified.sampled_at[layout.logit_start[drafts.requests] + 1 + drafts.parents]
    return PassOutcome(
        requests=requests,
        drafts=drafts,
        reached=reached,
        accepted=verified.accepted,
        num_accepted=verified.num_accepted,
        num_tokens=layout.num_tokens,
        num_rows=len(layout.row),
        seconds=seconds,
        is_decoding=layout.is_decoding,
        num_seen=layout.num_seen,
    )
