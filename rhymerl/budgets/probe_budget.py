"""The budget for looking for drafts that pay: a small share of all passes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

_SHARE = 0.005  # of a pass that each pass adds
_SHARE_SAVED = 0.02  # of what drafts have saved, as long as there is some: what has paid is looked for harder
_MOST = 4.0  # in the balance
_MOST_SAVED = 32.0  # bad passes come in runs, and after good ones they are no reason to stop
_LATELY = 0.7
_CHEAPEST = 0.05

# plain: the drafter is left alone. trial: so too, to see what that costs. probe: it is asked for some requests, to see
# whether drafts would pay. draft: for all, because they do.
Kind = Literal["plain", "trial", "probe", "draft"]

PROBED = 8  # requests that a probe asks for
PROBE_NODES = 16  # of each; also the first reach
TRUST = 4  # times as many nodes as have been verified at once may be tried: beyond that nobody knows what a pass costs
_TRUSTED = 128  # so many at first


@dataclass(slots=True)
class ProbeCourse:
    """The next thing to do, and the reason."""

    reach: float  # how many nodes of a request are worth asking for: those that are then cut away cost time too
    drafts: bool = False  # the drafter is asked for all requests, because that pays
    misses: int = 0  # passes in a row in which it did not seem to
    rows: int = 0  # of the batch for which that was decided
    passes: int = 0
    probes: int = 0
    trusted: int = _TRUSTED  # nodes that may be verified at once
    # Requests, and whether their tokens are worth the same, for which the next two were chosen.
    batch: tuple[int, bool] = (0, False)
    gain: float = 1.0
    num_asked: int = 0
    attempt: list[Kind] = field(default_factory=list)  # kinds of the passes that come next, of a probe under way


@dataclass(slots=True)
class ProbeBudget:
    """Passes without drafts that probes may cost: a `balance` that grows with each pass, and what drafts have `saved`.

    A probe is a pass in which the drafter is asked although it has not paid lately; `price` is what one has cost of
    late. Probes are paid from the balance, to which some of the savings go with each pass. Drafts that lose spend the
    savings first.
    """

    balance: float = 1.0
    saved: float = 2.0  # lent: drafts are looked for from the start, but what rhymes may come later
    price: float = 0.3

    @property
    def affords_probe(self) -> bool:
        return self.balance >= self.price

    @property
    def passes_until_probe(self) -> int:
        """Return how many passes earn what is missing, at least 1."""
        missing = self.price - self.balance
        fast = min(missing / (_SHARE + _SHARE_SAVED), self.saved / _SHARE_SAVED)
        return max(math.ceil(fast + (missing - fast * (_SHARE + _SHARE_SAVED)) / _SHARE), 1)

    @property
    def is_spent(self) -> bool:
        return self.balance + self.saved < 0

    def earn(self, passes: int) -> None:
        """So many passes begin."""
        moved = min(self.saved, passes * _SHARE_SAVED, max(self._most - self.balance, 0.0))
        self.saved -= moved
        self.balance = min(self.balance + passes * _SHARE + moved, self._most)

    def grant_probe(self) -> None:
        """Something new is known: the next probe need not be saved up for."""
        self.balance = max(self.balance, self.price)

    def pay_probe(self, cost: float) -> None:
        """A probe took `cost` plain passes longer than its tokens would have.

        What was measured counts on average only, since the machine may have done something else meanwhile.
        """
        self.price = _LATELY * self.price + (1 - _LATELY) * min(max(cost, _CHEAPEST), 1 + 3 * self.price)
        self.balance -= self.price

    def settle(self, worth: float) -> None:
        """Record that a pass with drafts saved `worth` plain passes; negative if it lost."""
        total = self.balance + self.saved + worth
        self.balance = min(total, self._most if worth > 0 else self.balance)
        self.saved = min(total - self.balance, _MOST_SAVED)

    @property
    def _most(self) -> float:
        return max(_MOST, self.price)
