"""What looking for drafts that pay may cost: a small share of all passes."""

from __future__ import annotations

from dataclasses import dataclass

_SHARE = 0.01  # of a pass that each pass adds
_MOST = 2.0  # saved up, so that drafts which no longer pay are soon noticed
_LATELY = 0.7
_CHEAPEST = 0.05


@dataclass(slots=True)
class Allowance:
    """A balance in passes without drafts: what drafts have saved beyond what they cost, and a share of every pass.

    A probe is a pass in which the drafter is asked although it has not paid lately; `price` is what one has cost of late.
    """

    balance: float = 0.5
    price: float = 0.3

    @property
    def affords_probe(self) -> bool:
        return self.balance >= self.price

    @property
    def is_spent(self) -> bool:
        return self.balance < 0

    def earn(self) -> None:
        """A pass begins."""
        self.balance = min(self.balance + _SHARE, _MOST)

    def grant_probe(self) -> None:
        """Something new is known: the next probe need not be saved up for."""
        self.balance = max(self.balance, self.price)

    def settle(self, worth: float | None, *, is_probe: bool) -> None:
        """A pass with drafts was worth so many plain passes more than it took; None where that cannot be told."""
        if is_probe and worth is not None:
            self.price = max(_LATELY * self.price - (1 - _LATELY) * worth, _CHEAPEST)
        if worth is None:
            worth = -self.price if is_probe else 0.0
        self.balance = min(self.balance + worth, _MOST)
