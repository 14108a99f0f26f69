"""Budgets: how much of what a drafter proposes is verified."""

from rhymerl.budgets.aimd import AIMDBudget
from rhymerl.budgets.base import Budget, PassOutcome
from rhymerl.budgets.fixed import FixedBudget
from rhymerl.budgets.goodput import GoodputBudget, UniformGoodputBudget

__all__ = ["AIMDBudget", "Budget", "FixedBudget", "GoodputBudget", "PassOutcome", "UniformGoodputBudget"]
