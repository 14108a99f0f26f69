"""The drafting protocol: ask, check, trim, learn; used by our engine, SGLang's and the replay of recorded answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from rhymerl.budgets.base import Budget, PassOutcome, Pauses
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.drafters.wrapped import innermost, listens
from rhymerl.drafts import DraftBatch, depths, keep_nodes, sound, within_turns
from rhymerl.errors import HookError
from rhymerl.history.records import HistoryDelta
from rhymerl.hooks import Hooks, line_of
from rhymerl.types import Completion, IndexArray, IntArray, RolloutRequest, Sample

_LOG = logging.getLogger(__name__)


class DraftingProtocol:
    """The calls of a drafter and a budget, in the order that their base classes promise. R = requests.

    With `checks` a malformed draft raises HookError; otherwise it is left out, counted, and told about once:
    `complaints` has the classes that have been told about, and is shared by the engines of a run. An exception of the
    drafter or budget becomes a HookError, too.
    """

    def __init__(
        self,
        drafter: Drafter,
        budget: Budget,
        *,
        vocabulary: int,
        checks: bool = False,
        complaints: set[type[Drafter]] | None = None,
    ) -> None:
        self.drafter = drafter
        self.budget = budget
        self.max_nodes = 0 if isinstance(drafter, NoDrafter) else budget.max_nodes
        self.num_asked = 0  # requests for which the drafter was asked
        self.num_hits = 0  # of these, those for which it had something
        self.num_malformed = 0
        self._malformed = ""  # what was the matter with the first one
        self.hears_tokens = self.max_nodes > 0 and listens(drafter, "accept")
        self.hears_outcomes = type(budget).learn is not Budget.learn
        self._hears_running = type(budget).note_running is not Budget.note_running
        self._vocabulary = vocabulary
        self._checks = checks
        self._pauses = Pauses(self._skips, self._count_passes)
        self._in_drafter, self._in_budget = Hooks("drafter", innermost(drafter)), Hooks("budget", budget)
        self._complaints = complaints if complaints is not None else set()

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
        self._pauses.tell()
        with self._in_budget:
            self.budget.finish(completion.request)

    # -- a pass ------------------------------------------------------------------------------------------------------

    def is_skipped(self, num_requests: int) -> bool:
        """Return whether the drafter is left alone in the pass that begins."""
        return self.max_nodes == 0 or num_requests == 0 or self._pauses.take(num_requests)

    def _skips(self, num_requests: int) -> int:
        with self._in_budget:
            return self.budget.skips(num_requests)

    def _count_passes(self, num_passes: int) -> None:
        with self._in_budget:
            self.budget.count_passes(num_passes)

    def limits(self, requests: Sequence[RolloutRequest], num_generated: IndexArray, *, num_waiting: int) -> IntArray:
        """Return how many nodes the budget grants each request, [R], a copy.

        `num_generated` [R] are the tokens of each answer, `num_waiting` the requests that have no slot yet.
        """
        with self._in_budget:
            if self._hears_running:
                self.budget.note_running(requests, num_generated, num_waiting=num_waiting)
            return np.array(self.budget.limits(requests), np.int32)

    def propose(
        self,
        requests: Sequence[RolloutRequest],
        contexts: Sequence[IntArray],
        limits: IntArray,
        room: IntArray | IndexArray,
    ) -> DraftBatch:
        """Ask for at most `limits` [R] nodes each, drop malformed drafts, and keep what the budget takes.

        `room` [R] are the tokens that may still come. The last of them is sampled at a node, so no node stands that
        deep.
        """
        with self._in_drafter:
            drafts = self.drafter.propose_batch(requests, contexts, limits.tolist())
        drafts = sound(drafts, requests, limits=limits, vocabulary=self._vocabulary, complain=self._complain)
        self.num_asked += len(requests)
        self.num_hits += int(np.count_nonzero(drafts.counts))
        if (limits >= room).any():
            drafts = keep_nodes(drafts, depths(drafts) < room[drafts.requests])
        if any(request.may_go_on for request in requests):
            drafts = within_turns(drafts, requests)
        with self._in_budget:
            mask = self.budget.trim(requests, drafts)
        return keep_nodes(drafts, mask)

    def _complain(self, proposed: str, num_requests: int) -> None:
        own = innermost(self.drafter)
        told = f"{type(own).__name__} proposed {proposed} ({line_of(own, 'propose')})"
        if self._checks:
            raise HookError(told)
        self.num_malformed += num_requests
        self._malformed = self._malformed or told
        if type(own) not in self._complaints:
            self._complaints.add(type(own))
            _LOG.warning("%s: such drafts are left out, and from now on only counted, as spec/bad_drafts", told)

    def check_drafts(self) -> None:
        """Raise HookError where most drafts so far were malformed: such a drafter cannot be judged."""
        if self.num_malformed > self.num_hits:
            num_drafts = self.num_malformed + self.num_hits
            raise HookError(f"{self.num_malformed} of {num_drafts} drafts were malformed: {self._malformed}")

    def catch_up(self) -> None:
        """The pass is launched; called only by engines whose passes run while this process goes on."""
        with self._in_drafter:
            self.drafter.catch_up()

    def accept(self, request: RolloutRequest, token_ids: IntArray, num_accepted: int) -> None:
        """A pass emitted tokens for a request; called only where the drafter listens (`hears_tokens`)."""
        with self._in_drafter:
            self.drafter.accept(request, token_ids, num_accepted)

    def learn_outcome(self, outcome: PassOutcome) -> None:
        """A pass that was not skipped is over; called only where the budget listens (`hears_outcomes`)."""
        with self._in_budget:
            self.budget.learn(outcome)

    # -- between steps -----------------------------------------------------------------------------------------------

    def learn(self, samples: Sequence[Sample]) -> None:
        """Tell the drafter the scored answers of a step."""
        with self._in_drafter:
            self.drafter.learn(samples)

    def follow(self, delta: HistoryDelta) -> None:
        """Tell drafter and budget what is new in the history."""
        with self._in_drafter:
            self.drafter.follow(delta)
        if self.max_nodes:
            with self._in_budget:
                self.budget.follow(delta)

    def close(self) -> None:
        """Close the drafter."""
        with self._in_drafter:
            self.drafter.close()
