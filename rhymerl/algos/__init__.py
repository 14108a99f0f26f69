"""Algorithms: what the samples teach the policy."""

from rhymerl.algos.base import Algorithm, Batch, PolicyOutput, Totals
from rhymerl.algos.distill import Distill
from rhymerl.algos.grpo import GRPO
from rhymerl.algos.policy_gradient import PolicyGradient
from rhymerl.algos.ppo import PPO

__all__ = ["GRPO", "PPO", "Algorithm", "Batch", "Distill", "PolicyGradient", "PolicyOutput", "Totals"]
