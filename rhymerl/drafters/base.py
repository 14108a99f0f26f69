"""The interface of drafters, which guess the next tokens. A wrong guess costs time, never correctness."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rhymerl.types import Completion, IntArray, RolloutRequest, Sample

if TYPE_CHECKING:
    from rhymerl.drafts import Draft, DraftBatch
    from rhymerl.history.records import HistoryDelta


class Drafter(ABC):
    """Subclass this and write `propose`; every other hook is an optional no-op."""

    @abstractmethod
    def propose(self, request: RolloutRequest, context: IntArray, budget: int) -> Draft:
        """Draft what follows `context` (prompt and response so far, int32, read-only), with at most `budget` nodes."""

    def propose_batch(
        self, requests: Sequence[RolloutRequest], contexts: Sequence[IntArray], budgets: Sequence[int]
    ) -> DraftBatch:
        """Draft for all requests that may have one, at most `budgets[r]` (1 or more) nodes each; called once a pass.

        Override it where a batch is cheaper than its parts.
        """
        from rhymerl.drafts import DraftBatch  # numpy comes with it

        return DraftBatch.pack([self.propose(*each) for each in zip(requests, contexts, budgets, strict=True)])

    def catch_up(self) -> None:
        """Called once the pass is launched for which drafts were proposed: do here what no draft waits for.

        An engine calls it after each pass that does not run where the drafter does, as on a GPU. From others
        it never comes, so what is left undone has to be done before the next drafts.
        """

    def start(self, request: RolloutRequest) -> None:
        """A request enters the running batch for the first time; once for every `finish`, whatever happens between."""

    def accept(self, request: RolloutRequest, token_ids: IntArray, num_accepted: int) -> None:
        """A pass emitted `token_ids` for `request`, the first `num_accepted` of them from the draft."""

    def finish(self, completion: Completion) -> None:
        """A started request leaves for good: it has ended, or the caller has withdrawn it (and may submit it anew)."""

    def learn(self, samples: Sequence[Sample]) -> None:
        """Learn from a step's scored answers, in canonical (prompt, sample) order."""

    def follow(self, delta: HistoryDelta) -> None:
        """Apply changes of the history; called after each step, and with a snapshot when a run starts or resumes."""

    def close(self) -> None:
        """Free threads and the like: engine and requests are gone. Another engine may `start` requests later."""
