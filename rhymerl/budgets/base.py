"""What a budget is: how much of what a drafter proposes is verified. It changes the speed of a run, never a token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rhymerl.types import DraftBatch, RolloutRequest

if TYPE_CHECKING:
    from rhymerl.types import BoolArray, IndexArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutcome:
    """What came of one pass. R = requests that sampled tokens in it, N = nodes that were verified."""

    requests: Sequence[RolloutRequest]  # [R]
    drafts: DraftBatch  # R, N: as verified; many may be empty
    reached: BoolArray  # [N] a draw was made that could have accepted the node: at its parent, or at the root
    accepted: BoolArray  # [N] the node became a token
    num_accepted: IndexArray  # [R]
    num_tokens: int  # fed in the whole pass: prompts, roots and nodes
    num_rows: int  # that fed them: requests, and prompts that are being computed
    seconds: float  # of the whole pass, drafting included
    is_decoding: bool  # every row fed one token and its draft, so that no prompt was computed


class Budget(ABC):
    """Subclass this and write `max_nodes` and `limits`; every other hook is optional."""

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """The most nodes that a request may ever get in a pass; 0 turns drafting off. Read once, by the engine."""

    def skips(self, num_requests: int, num_passes: int) -> int:
        """Return for how many passes, this one included, the drafter is left alone.

        The engine asks this first, when `num_passes` have begun since the last time. That holds as long as the same
        `num_requests` are running. Nothing is asked meanwhile, and `learn` hears nothing of these passes: so passes
        without drafts cost next to nothing.
        """
        return 0

    @abstractmethod
    def limits(self, requests: Sequence[RolloutRequest]) -> IntArray:
        """How many nodes the drafter may propose for each request, [R]; called once a pass that is not skipped, before drafting.

        The engine grants less where slots or tokens run out, and never more than `max_nodes`.
        """

    def admit(self, request: RolloutRequest) -> None:
        """A request enters the running batch for the first time."""

    def trim(self, requests: Sequence[RolloutRequest], drafts: DraftBatch) -> BoolArray:
        """Which nodes are verified, [N]; called after drafting. A node whose parent is dropped is dropped too."""
        return np.ones(len(drafts.token_ids), np.bool_)

    def learn(self, outcome: PassOutcome) -> None:
        """A pass is over; called after each one in which requests sampled tokens, unless it was skipped."""

    def finish(self, request: RolloutRequest) -> None:
        """A request left for good: drop what is kept for it."""

    def state_dict(self) -> dict[str, Any]:
        """What has been learned, in plain containers: with it a resumed run verifies the very nodes that the whole run did."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""

    def metrics(self) -> Mapping[str, float]:
        """What happened since the last call, by metric name; then reset."""
        return {}


class Pauses:
    """Counts the passes for which a budget leaves the drafter alone; `skips` is the budget's."""

    def __init__(self, skips: Callable[[int, int], int]) -> None:
        self._skips = skips
        self._num_requests = 0
        self._left = 0  # passes that are still skipped
        self._passes = 0  # since the budget was asked

    def end(self) -> None:
        """A request enters. What is counted here is in no checkpoint, and a resumed run begins with this, too."""
        self._left = self._passes = 0

    def take(self, num_requests: int) -> bool:
        """Whether the pass that begins is skipped."""
        self._passes += 1
        if self._left == 0 or num_requests != self._num_requests:
            self._left = self._skips(num_requests, self._passes)
            self._num_requests, self._passes = num_requests, 0
            if self._left == 0:
                return False
        self._left -= 1
        return True
