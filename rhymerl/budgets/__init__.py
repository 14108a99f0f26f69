"""Budgets: how much of what a drafter proposes is verified."""

from rhymerl.budgets.base import Budget, PassOutcome
from rhymerl.budgets.fixed import FixedBudget

__all__ = ["Budget", "FixedBudget", "PassOutcome"]
