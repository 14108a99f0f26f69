"""The rollout loop: prompts in, scored samples out."""

from rhymerl.rewards.failures import Failures
from rhymerl.rollout.base import Rollout, RolloutSettings, request_seed, requests_of
from rhymerl.rollout.coordinator import Command, ProgressReport, SharedPlan
from rhymerl.rollout.loop import RolloutLoop
from rhymerl.rollout.results import RankResult, ScoredOutput
from rhymerl.rollout.run_ahead import RunAheadState
from rhymerl.rollout.worker import MovedRequest
from rhymerl.types import Output

# What travels between ranks, apart from plain data and arrays.
RECORDS: tuple[type, ...] = (
    Command,
    Failures,
    MovedRequest,
    Output,
    ProgressReport,
    RankResult,
    RunAheadState,
    ScoredOutput,
    SharedPlan,
)

__all__ = ["RECORDS", "Rollout", "RolloutLoop", "RolloutSettings", "request_seed", "requests_of"]
