"""The rollout loop: prompts in, scored samples out."""

from rhymerl import workers
from rhymerl.rewards.failures import Failures
from rhymerl.rollout.base import Rollout, RolloutSettings, request_seed, requests_of
from rhymerl.rollout.loop import RolloutLoop
from rhymerl.rollout.results import RankResult, ScoredOutput

# What travels between ranks, apart from plain data and arrays.
RECORDS: tuple[type, ...] = (*workers.RECORDS, Failures, RankResult, ScoredOutput)

__all__ = ["RECORDS", "Rollout", "RolloutLoop", "RolloutSettings", "request_seed", "requests_of"]
