"""The budget for looking for drafts that pay: a small share of all passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

_SHARE = 0.005  # of a pass that each pass adds
_SHARE_SAVED = 0.02  # of what drafts have saved, as long as there is some: what has paid is looked for harder
_MOST = 4.0  # in the balance
_MOST_SAVED = 32.0  # bad passes come in runs, and after good ones they are no reason to stop
_LATELY = 0.7
_CHEAPEST = 0.05


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
