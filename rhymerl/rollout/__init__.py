"""The rollout loop: prompts in, scored samples out."""

from rhymerl.rewards.failures import Failures
from rhymerl.rollout.ahead import Ahead, Drawn
from rhymerl.rollout.base import Rollout, RolloutSettings, request_seed, requests_of
from rhymerl.rollout.conductor import Orders, Report
from rhymerl.rollout.loop import RolloutLoop
from rhymerl.rollout.part import Moved
from rhymerl.rollout.plans import SharedPlan
from rhymerl.rollout.rounds import Answered, Share
from rhymerl.types import Generated

# What travels between ranks, apart from plain data and arrays.
RECORDS: tuple[type, ...] = (Ahead, Answered, Drawn, Failures, Generated, Moved, Orders, Report, Share, SharedPlan)

__all__ = ["RECORDS", "Rollout", "RolloutLoop", "RolloutSettings", "request_seed", "requests_of"]
