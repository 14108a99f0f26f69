"""Between the engine and its drafter and budget: asks, checks, trims, and tells what came of it. E = emitting rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rhymerl.budgets.base import Budget, PassOutcome
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.drafters.run_ahead import listens
from rhymerl.engine.layout import PassLayout
from rhymerl.engine.ragged import IndexArray
from rhymerl.engine.rows import Rows
from rhymerl.engine.totals import NUM_DEPTHS, EngineTotals
from rhymerl.engine.tree import depths, no_drafts, sound
from rhymerl.engine.verify import Walk
from rhymerl.types import Completion, DraftBatch, DraftSource, RolloutRequest

if TYPE_CHECKING:
    from rhymerl.types import IntArray


class Drafting:
    """The drafts of an engine's passes. Without a drafter, or with a budget of nothing, every pass is without drafts.

    With `checks` a malformed draft raises ValueError; otherwise it is left out and counted.
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
        self._is_skipped = True  # the drafter is left alone in it
        self._nothing = no_drafts(0)
        self._hears_tokens = self.max_nodes > 0 and listens(drafter, "accept")
        self._hears_outcomes = type(budget).learn is not Budget.learn

    def start(self, request: RolloutRequest) -> None:
        """A request enters for the first time."""
        self.drafter.start(request)
        self.budget.admit(request)

    def finish(self, completion: Completion) -> None:
        """A request that was started leaves for good."""
        self.drafter.finish(completion)
        self.budget.finish(completion.request)

    # -- before the pass -------------------------------------------------------------------------------------

    def ask(self, row: IndexArray, *, spare: int) -> DraftBatch:
        """What is verified below the roots of the rows `row` [E]: at most `spare` nodes in all."""
        self._is_skipped = self.max_nodes == 0 or len(row) == 0 or self.budget.skips(len(row))
        if not self._is_skipped or self._hears_tokens:
            self._requests = [request for each in row.tolist() if (request := self._rows.request[each]) is not None]
        if self._is_skipped:
            return self._no_drafts(len(row))
        started = time.perf_counter()
        limits = self._limits(row, max(spare, 0))
        askers = np.flatnonzero(limits)
        drafts = self._asked(row, askers, limits[askers]).spread(askers, len(row)) if len(askers) else None
        self._totals.draft_s += time.perf_counter() - started
        return drafts or self._no_drafts(len(row))

    def _no_drafts(self, num_rows: int) -> DraftBatch:
        if len(self._nothing) != num_rows:
            self._nothing = no_drafts(num_rows)
        return self._nothing

    def _limits(self, row: IndexArray, spare: int) -> IntArray:
        """How many nodes each row may have, [E]."""
        rows, limits = self._rows, self.budget.limits(self._requests)
        if not limits.any():
            return limits
        limits = np.minimum(limits, min(self.max_nodes, spare))
        limits = np.minimum(limits, rows.context - rows.length[row]).clip(min=0).astype(np.int32)
        limits[_deepest(rows, row) <= 0] = 0
        if limits.sum() > spare:
            limits = np.minimum(limits, spare // int((limits > 0).sum()))
        return limits

    def _asked(self, row: IndexArray, askers: IndexArray, limits: IntArray) -> DraftBatch:
        """The drafts of the asking rows, checked, and cut to what can be emitted and what the budget takes."""
        requests = [self._requests[asker] for asker in askers.tolist()]
        drafts = self.drafter.propose_batch(requests, self._rows.contexts_of(row[askers]), limits.tolist())
        drafts = sound(drafts, requests, limits=limits, vocabulary=self._vocabulary, complain=self._complain)
        self._totals.asks += len(askers)
        self._totals.hits += int((drafts.counts > 0).sum())
        drafts = drafts.keep(depths(drafts) <= _deepest(self._rows, row[askers])[drafts.requests])
        return drafts.keep(drafts.closed(self.budget.trim(requests, drafts)))

    def _complain(self, proposed: str, num_requests: int) -> None:
        if self._checks:
            raise ValueError(f"{type(self.drafter).__name__} proposed {proposed}")
        self._totals.bad_drafts += num_requests

    # -- after the pass --------------------------------------------------------------------------------------

    def tell(self, layout: PassLayout, steps: Walk, *, seconds: float) -> None:
        """Count what was accepted, and let drafter and budget know; before finished rows leave."""
        if len(layout.node_place):
            self._count(layout, steps)
        if self._hears_tokens:
            ends = np.cumsum(steps.num_emitted)
            starts, ends = (ends - steps.num_emitted).tolist(), ends.tolist()
            for request, start, end, accepted in zip(
                self._requests, starts, ends, steps.num_accepted.tolist(), strict=True
            ):
                self.drafter.accept(request, steps.token[start:end], accepted)
        if self._hears_outcomes and not self._is_skipped:
            self.budget.learn(_outcome(self._requests, layout, steps, seconds))

    def _count(self, layout: PassLayout, steps: Walk) -> None:
        totals, levels = self._totals, np.arange(1, NUM_DEPTHS + 1)
        deepest = np.zeros(len(layout.emits), np.int64)
        nodes = layout.drafts.requests
        np.maximum.at(deepest, nodes, layout.node_depth)
        totals.drafts_to_depth = totals.drafts_to_depth + (deepest[:, None] >= levels).sum(0)
        totals.accepted_to_depth = totals.accepted_to_depth + (steps.num_accepted[:, None] >= levels).sum(0)
        totals.drafted_nodes += len(nodes)
        totals.accepted_nodes += int(steps.num_accepted.sum())
        totals.drafted_run_ahead += int((layout.drafts.sources == DraftSource.RUN_AHEAD).sum())
        self._count_sources(layout.drafts.sources[steps.accepted])

    def _count_sources(self, sources: npt.NDArray[np.int8]) -> None:
        """Of accepted nodes."""
        totals, ages = self._totals, sources[sources >= DraftSource.HISTORY] - np.int8(DraftSource.HISTORY)
        totals.accepted_own += int((sources == DraftSource.OWN).sum())
        totals.accepted_sibling += int((sources == DraftSource.SIBLING).sum())
        totals.accepted_run_ahead += int((sources == DraftSource.RUN_AHEAD).sum())
        totals.accepted_history += len(ages)
        totals.accepted_age_epochs += int(ages.sum(dtype=np.int64))


def _deepest(rows: Rows, row: IndexArray) -> IndexArray:
    """The last token that fits is drawn at a node, so no node may stand in its place."""
    return rows.limit[row] - rows.length[row] - 1


def _outcome(requests: Sequence[RolloutRequest], layout: PassLayout, steps: Walk, seconds: float) -> PassOutcome:
    drafts, reached = layout.drafts, steps.accepted
    if len(layout.node_place):
        reached = steps.drawn_at[layout.logit_start[drafts.requests] + 1 + drafts.parents]
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
