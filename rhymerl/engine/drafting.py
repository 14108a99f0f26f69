"""The link between the engine and its drafter and budget. E = emitting rows.

It asks for drafts, checks and trims them, and reports what came of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rhymerl.budgets.base import Budget, PassOutcome, Pauses
from rhymerl.compiled import compiled
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.batches import keep_nodes
from rhymerl.drafters.none import NoDrafter
from rhymerl.drafters.run_ahead import innermost, listens
from rhymerl.engine.layout import PassLayout
from rhymerl.engine.ragged import IndexArray
from rhymerl.engine.rows import Rows
from rhymerl.engine.totals import NUM_DEPTHS, EngineTotals
from rhymerl.engine.tree import depths, no_drafts, sound
from rhymerl.engine.verify import Walk
from rhymerl.errors import HookError
from rhymerl.hooks import Hooks, line_of
from rhymerl.types import Completion, DraftBatch, DraftSource, RolloutRequest, Sample

if TYPE_CHECKING:
    from rhymerl.history.records import HistoryDelta
    from rhymerl.types import BoolArray, IntArray

_LOG = logging.getLogger(__name__)
_RUN_AHEAD, _HISTORY = int(DraftSource.RUN_AHEAD), int(DraftSource.HISTORY)


class Drafting:
    """The drafts of an engine's passes. Without a drafter, or with a budget of nothing, every pass is without drafts.

    With `checks` a malformed draft raises HookError; otherwise it is left out, counted, and told about once. What drafter or budget
    raise becomes a HookError, too.
    """

    def __init__(
        self, drafter: Drafter, budget: Budget, rows: Rows, totals: EngineTotals, *, vocabulary: int, checks: bool
    ) -> None:
        self.drafter = drafter
        self.budget = budget
        self.max_nodes = 0 if isinstance(drafter, NoDrafter) else budget.max_nodes
        self._rows = rows
        self._totals = totals
        self._vocabulary = vocabulary
        self._checks = checks
        self._requests: list[RolloutRequest] = []  # of the rows that emit in the pass under way
        self._pauses = Pauses(self._skips)
        self._is_skipped = True  # the drafter is left alone in it
        self._nothing = no_drafts(0)
        own = innermost(drafter)
        self._in_drafter, self._in_budget = Hooks("drafter", own), Hooks("budget", budget)
        self._has_complained = False
        self._hears_tokens = self.max_nodes > 0 and listens(drafter, "accept")
        self._hears_outcomes = type(budget).learn is not Budget.learn

    def start(self, request: RolloutRequest) -> None:
        """A request enters for the first time."""
        self._pauses.end()
        with self._in_drafter:
            self.drafter.start(request)
        with self._in_budget:
            self.budget.admit(request)

    def finish(self, completion: Completion) -> None:
        """A request that was started leaves for good."""
        with self._in_drafter:
            self.drafter.finish(completion)
        with self._in_budget:
            self.budget.finish(completion.request)

    # -- before the pass -------------------------------------------------------------------------------------

    def ask(self, row: IndexArray, *, spare: int) -> DraftBatch:
        """What is verified below the roots of the rows `row` [E]: at most `spare` nodes in all."""
        self._is_skipped = self.max_nodes == 0 or len(row) == 0 or self._pauses.take(len(row))
        if not self._is_skipped or self._hears_tokens:
            self._requests = [request for each in row.tolist() if (request := self._rows.request[each]) is not None]
        if self._is_skipped:
            return self._no_drafts(len(row))
        started = time.perf_counter()
        limits = self._limits(row, max(spare, 0))
        askers = np.flatnonzero(limits)
        drafts = self._no_drafts(len(row))
        if len(askers):
            requests = [self._requests[asker] for asker in askers.tolist()]
            drafts = self._asked(row[askers], limits[askers], requests).spread(askers, len(row))
        self._totals.draft_s += time.perf_counter() - started
        return drafts

    def _skips(self, num_requests: int, num_passes: int) -> int:
        with self._in_budget:
            return self.budget.skips(num_requests, num_passes)

    def _no_drafts(self, num_rows: int) -> DraftBatch:
        if len(self._nothing) != num_rows:
            self._nothing = no_drafts(num_rows)
        return self._nothing

    def _limits(self, row: IndexArray, spare: int) -> IntArray:
        """How many nodes each row may have, [E]."""
        with self._in_budget:
            rows, limits = self._rows, np.array(self.budget.limits(self._requests), np.int32)
        _fit(limits, row, rows.length, rows.limit, rows.context, self.max_nodes, spare)
        return limits

    def _asked(self, row: IndexArray, limits: IntArray, requests: Sequence[RolloutRequest]) -> DraftBatch:
        """The drafts of the asking rows, checked, and cut to what can be emitted and what the budget takes."""
        rows = self._rows
        with self._in_drafter:
            drafts = self.drafter.propose_batch(requests, rows.contexts_of(row), limits.tolist())
        drafts = sound(drafts, requests, limits=limits, vocabulary=self._vocabulary, complain=self._complain)
        self._totals.asks += len(row)
        self._totals.hits += int(np.count_nonzero(drafts.counts))
        deepest = rows.limit[row] - rows.length[row] - 1  # the last token that fits is sampled at a node
        if (limits > deepest).any():
            drafts = keep_nodes(drafts, depths(drafts) <= deepest[drafts.requests])
        with self._in_budget:
            mask = self.budget.trim(requests, drafts)
        return keep_nodes(drafts, mask)

    def _complain(self, proposed: str, num_requests: int) -> None:
        own = self._in_drafter.component
        told = f"{type(own).__name__} proposed {proposed} ({line_of(own, 'propose')})"
        if self._checks:
            raise HookError(told)
        self._totals.bad_drafts += num_requests
        if not self._has_complained:
            self._has_complained = True
            _LOG.warning("%s: such drafts are left out, and from now on only counted, as spec/bad_drafts", told)

    # -- after the pass --------------------------------------------------------------------------------------

    def tell(self, layout: PassLayout, steps: Walk, *, seconds: float) -> None:
        """Count what was accepted, and let drafter and budget know; before finished rows leave."""
        if len(layout.node_index):
            self._count(layout, steps)
        if self._hears_tokens:
            ends = np.cumsum(steps.num_emitted)
            starts, ends = (ends - steps.num_emitted).tolist(), ends.tolist()
            with self._in_drafter:
                for request, start, end, accepted in zip(
                    self._requests, starts, ends, steps.num_accepted.tolist(), strict=True
                ):
                    self.drafter.accept(request, steps.token[start:end], accepted)
        if self._hears_outcomes and not self._is_skipped:
            with self._in_budget:
                self.budget.learn(_outcome(self._requests, layout, steps, seconds))

    # -- between steps ---------------------------------------------------------------------------------------

    def learn(self, samples: Sequence[Sample]) -> None:
        """The drafter's hook of that name, like the two that follow."""
        with self._in_drafter:
            self.drafter.learn(samples)

    def follow(self, delta: HistoryDelta) -> None:
        with self._in_drafter:
            self.drafter.follow(delta)

    def close(self) -> None:
        with self._in_drafter:
            self.drafter.close()

    def _count(self, layout: PassLayout, steps: Walk) -> None:
        totals, drafts = self._totals, layout.drafts
        by_depth, by_source = np.zeros((2, NUM_DEPTHS), np.int64), np.zeros(6, np.int64)
        _tally(
            drafts.starts, layout.node_depth, drafts.sources, steps.accepted, steps.num_accepted, by_depth, by_source
        )
        own, sibling, run_ahead, history, ages, drafted_run_ahead = by_source.tolist()
        totals.drafts_to_depth = totals.drafts_to_depth + by_depth[0]
        totals.accepted_to_depth = totals.accepted_to_depth + by_depth[1]
        totals.drafted_nodes += len(drafts.parents)
        totals.accepted_nodes += int(steps.num_accepted.sum())
        totals.drafted_run_ahead += drafted_run_ahead
        totals.accepted_own += own
        totals.accepted_sibling += sibling
        totals.accepted_run_ahead += run_ahead
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
    """by_depth[0, d] counts drafts with nodes deeper than d, by_depth[1, d] those accepted as far; by_source as `_count` reads it."""
    for r in range(len(num_accepted)):
        deepest = 0
        for node in range(starts[r], starts[r + 1]):
            deepest = max(deepest, depth[node])
            by_source[5] += sources[node] == _RUN_AHEAD
            if accepted[node]:
                if sources[node] >= _HISTORY:
                    by_source[3] += 1
                    by_source[4] += sources[node] - _HISTORY
                elif sources[node] >= 0:
                    by_source[sources[node]] += 1
        for d in range(by_depth.shape[1]):
            by_depth[0, d] += deepest > d
            by_depth[1, d] += num_accepted[r] > d


def _outcome(requests: Sequence[RolloutRequest], layout: PassLayout, steps: Walk, seconds: float) -> PassOutcome:
    drafts, reached = layout.drafts, steps.accepted
    if len(layout.node_index):
        reached = steps.sampled_at[layout.logit_start[drafts.requests] + 1 + drafts.parents]
    return PassOutcome(
        requests=requests,
        drafts=drafts,
        reached=reached,
        accepted=steps.accepted,
        num_accepted=steps.num_accepted,
        num_tokens=layout.num_tokens,
        num_rows=len(layout.row),
        seconds=seconds,
        is_decoding=layout.is_decoding,
    )
