"""Algorithms: what the samples teach the policy."""

from rhymerl.algos.base import Algorithm, Batch, PolicyOutput, Totals
from rhymerl.algos.grpo import GRPO

__all__ = ["GRPO", "Algorithm", "Batch", "PolicyOutput", "Totals"]
