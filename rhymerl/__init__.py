"""Reinforcement-learning post-training of language models, with rollouts that learn from their own history.

    module = rhymerl.RhymeModule("path/to/model", drafter=MyDrafter())
    lightning.Trainer(max_steps=100).fit(module, rhymerl.PromptDataModule("train.jsonl"))

What needs torch, numpy or lightning is imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhymerl.drafters.base import Drafter
from rhymerl.errors import BackendError, ConfigError, DataError, RewardError, RhymeError, RunError, UsageError
from rhymerl.lazy import lazy_names
from rhymerl.schedulers import FIFOScheduler, Scheduler
from rhymerl.types import Completion, Output, Prompt, RolloutRequest, Sample, SamplingParams

if TYPE_CHECKING:
    from rhymerl.algos.base import Algorithm
    from rhymerl.algos.grpo import GRPO
    from rhymerl.algos.ppo import PPO
    from rhymerl.backends.base import RolloutBackend
    from rhymerl.backends.embedded import EmbeddedBackend
    from rhymerl.backends.sglang.backend import SGLangBackend
    from rhymerl.data import PromptDataModule
    from rhymerl.drafters.none import NoDrafter
    from rhymerl.drafts import Draft
    from rhymerl.environments.base import Environment, Reply
    from rhymerl.models.policy import PolicySource
    from rhymerl.rewards import Reward
    from rhymerl.rollout import RolloutLoop, RolloutSettings
    from rhymerl.runs.script import fit
    from rhymerl.tasks import Task
    from rhymerl.training.fsdp2 import FSDP2Strategy
    from rhymerl.training.module import RhymeModule
    from rhymerl.training.settings import UpdateSettings
    from rhymerl.version import __version__

__all__ = [
    "GRPO",
    "PPO",
    "Algorithm",
    "BackendError",
    "Completion",
    "ConfigError",
    "DataError",
    "Draft",
    "Drafter",
    "EmbeddedBackend",
    "Environment",
    "FIFOScheduler",
    "FSDP2Strategy",
    "NoDrafter",
    "Output",
    "PolicySource",
    "Prompt",
    "PromptDataModule",
    "Reply",
    "Reward",
    "RewardError",
    "RhymeError",
    "RhymeModule",
    "RolloutBackend",
    "RolloutLoop",
    "RolloutRequest",
    "RolloutSettings",
    "RunError",
    "SGLangBackend",
    "Sample",
    "SamplingParams",
    "Scheduler",
    "Task",
    "UpdateSettings",
    "UsageError",
    "__version__",
    "fit",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __getattr__, __dir__ = lazy_names(__name__)
