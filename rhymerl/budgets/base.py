"""The interface of budgets: how many drafted nodes are verified. It changes the speed of a run, never a token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rhymerl.drafts import DraftBatch
from rhymerl.history.records import HistoryDelta
from rhymerl.types import BoolArray, IndexArray, IntArray, RolloutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutcome:
    """The outcome of one pass. R = requests that sampled tokens in it, N = nodes that were verified."""

    requests: Sequence[RolloutRequest]  # [R]
    drafts: DraftBatch  # R, N: as verified; many may be empty
    reached: BoolArray  # [N] a draw was made that could have accepted the node: at its parent, or at the root
    accepted: BoolArray  # [N] the node became a token
    num_accepted: IndexArray  # [R]
    num_tokens: int  # fed in the whole pass: prompts, roots and nodes
    num_rows: int  # that fed them: requests, and prompts that are being computed
    seconds: float | None  # of the whole pass, drafting included; None: something else ran meanwhile
    is_decoding: bool  # every row fed one token and its draft, so that no prompt was computed
    num_seen: int = 0  # keys that roots and nodes attended to, summed; 0 where that is not known
    num_padding: int = 0  # of the tokens, those that only fill trees up to one size: they cost what nodes do

    @property
    def num_verified(self) -> int:
        """Nodes that were computed, padding among them."""
        return len(self.drafts.token_ids) + self.num_padding

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that were neither roots nor nodes."""
        return self.num_tokens - len(self.requests) - self.num_verified


class Budget(ABC):
    """Subclass this and write `max_nodes` and `limits`; every other hook is optional."""

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """The most nodes that a request may ever get in a pass; 0 turns drafting off. Read once, by the engine."""

    widths: Sequence[int] = ()  # see `uniform`

    def uniform(self, widths: Sequence[int]) -> Budget | None:
        """Return this budget for an engine that computes equally many nodes of each request in a pass.

        The number is one of `widths`, which rise. It has at most the last of them, and `widths` of its own: those that
        passes may then have. None: it cannot be kept so. It is not inherited, since a subclass may have overridden
        anything.
        """
        return None

    def skips(self, num_requests: int) -> int:
        """Return for how many passes, the one that begins included, the drafter is left alone.

        That holds as long as none enters and more than half of the `num_requests` are running. Nothing is asked
        meanwhile, and `learn` hears nothing of these passes: so passes without drafts cost next to nothing.
        """
        return 0

    def count_passes(self, num_passes: int) -> None:
        """So many passes have begun since the last call; called before `skips`, and when requests enter or leave."""

    def note_running(self, requests: Sequence[RolloutRequest], num_generated: IndexArray, *, num_waiting: int) -> None:
        """Called before `limits` with the requests of a pass that is not skipped.

        `num_generated` are the tokens of each answer, [R]; `num_waiting` requests wait for a slot.
        """

    @abstractmethod
    def limits(self, requests: Sequence[RolloutRequest]) -> IntArray:
        """Return how many nodes the drafter may propose for each request, [R].

        Called once a pass that is not skipped, before drafting. The engine grants less where slots or tokens run out,
        and never more than `max_nodes`.
        """

    def admit(self, request: RolloutRequest) -> None:
        """A request enters the running batch for the first time."""

    def trim(self, requests: Sequence[RolloutRequest], drafts: DraftBatch) -> BoolArray:
        """Return which nodes are verified, [N]; called after drafting. Children of dropped nodes are dropped too."""
        return np.ones(len(drafts.token_ids), np.bool_)

    def learn(self, outcome: PassOutcome) -> None:
        """A pass is over; called after each one in which requests sampled tokens, unless it was skipped."""

    def finish(self, request: RolloutRequest) -> None:
        """A request left for good: drop what is kept for it."""

    def follow(self, delta: HistoryDelta) -> None:
        """Take new answers of the history, between steps; the first call has all of them, as for a drafter."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, in plain containers: a resumed run verifies the same nodes as a whole one."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics since the last call by name, and reset them."""
        return {}


class Pauses:
    """Counts the passes for which a budget leaves the drafter alone; `skips` and `count_passes` are the budget's.

    What is counted here is in no checkpoint, so it is told whenever a request leaves.
    """

    def __init__(self, skips: Callable[[int], int], count_passes: Callable[[int], None]) -> None:
        self._skips = skips
        self._count_passes = count_passes
        self._num_requests = 0
        self._left = 0  # passes that are still skipped
        self._passes = 0  # begun and not told of

    def end(self) -> None:
        """A request enters."""
        self.tell()
        self._left = 0

    def tell(self) -> None:
        """A request enters or leaves, or the budget is asked next."""
        if self._passes:
            self._count_passes(self._passes)
            self._passes = 0

    def take(self, num_requests: int) -> bool:
        """Return whether the pass that begins is skipped."""
        self._passes += 1
        if self._left == 0 or not self._num_requests / 2 < num_requests <= self._num_requests:
            self.tell()
            self._left = self._skips(num_requests)
            self._num_requests = num_requests
            if self._left == 0:
                return False
        self._left -= 1
        return True
