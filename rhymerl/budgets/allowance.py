"""What looking for drafts that pay may cost: a small share of all passes."""

from __future__ import annotations

from dataclasses import dataclass

_SHARE = 0.005  # of a pass that each pass adds
_MOST = 4.0  # saved up: enough for some bad passes among good ones, and few enough that drafts which no longer pay are soon noticed
_LATELY = 0.7
_CHEAPEST = 0.05


@dataclass(slots=True)
class Allowance:
    """A balance in passes without drafts: what drafts have saved beyond what they cost, and a share of every pass.

    A probe is a pass in which the drafter is asked although it has not paid lately; `price` is what one has cost of late.
    """

    balance: float = 4.0  # drafts are looked for at once, at the price of some passes
    price: float = 0.3

    @property
    def affords_probe(self) -> bool:
        return self.balance >= self.price

    @property
    def is_spent(self) -> bool:
        return self.balance < 0

    def earn(self, passes: int) -> None:
        """So many passes begin."""
        self._add(passes * _SHARE)

    def grant_probe(self) -> None:
        """Something new is known: the next probe need not be saved up for."""
        self.balance = max(self.balance, self.price)

    def pay_probe(self, cost: float | None) -> None:
        """A probe took `cost` plain passes longer than its tokens would have; None where that cannot be told.

        What was measured counts on average only, since the machine may have done something else meanwhile.
        """
        if cost is not None:
            self.price = _LATELY * self.price + (1 - _LATELY) * min(max(cost, _CHEAPEST), 1 + 3 * self.price)
        self._add(-self.price)

    def settle(self, worth: float) -> None:
        """A pass with drafts made tokens for which as many plain passes more would have been needed; fewer where it is negative."""
        self._add(worth)

    def _add(self, passes: float) -> None:
        self.balance = min(self.balance + passes, max(_MOST, self.price))
