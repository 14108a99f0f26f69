"""The rollout loop: prompts in, scored samples out."""

from rhymerl.rollout.base import Rollout, RolloutSettings, request_seed, requests_of
from rhymerl.rollout.loop import RolloutLoop

__all__ = ["Rollout", "RolloutLoop", "RolloutSettings", "request_seed", "requests_of"]
