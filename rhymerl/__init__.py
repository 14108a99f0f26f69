"""Reinforcement-learning post-training of language models, with rollouts that learn from their own history.

    module = rhymerl.RhymeModule("path/to/model", drafter=MyDrafter())
    lightning.Trainer(max_steps=100).fit(module, rhymerl.PromptDataModule("train.jsonl"))

What needs torch, numpy or lightning is imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rhymerl.drafters.base import Drafter
from rhymerl.errors import BackendError, ConfigError, DataError, RewardError, RhymeError, RunError, UsageError
from rhymerl.schedulers import FIFOScheduler, Scheduler
from rhymerl.types import Completion, Draft, Generated, Prompt, RolloutRequest, Sample, SamplingParams

if TYPE_CHECKING:
    from rhymerl.algos.base import Algorithm
    from rhymerl.algos.grpo import GRPO
    from rhymerl.backends.base import RolloutBackend
    from rhymerl.backends.embedded import EmbeddedBackend
    from rhymerl.data import PromptDataModule
    from rhymerl.drafters.none import NoDrafter
    from rhymerl.module import RhymeModule
    from rhymerl.policy import PolicySource
    from rhymerl.rewards import Reward
    from rhymerl.rollout import RolloutLoop, RolloutSettings
    from rhymerl.tasks import Task
    from rhymerl.update import UpdateSettings

    __version__: str

__all__ = [
    "GRPO",
    "Algorithm",
    "BackendError",
    "Completion",
    "ConfigError",
    "DataError",
    "Draft",
    "Drafter",
    "EmbeddedBackend",
    "FIFOScheduler",
    "Generated",
    "NoDrafter",
    "PolicySource",
    "Prompt",
    "PromptDataModule",
    "Reward",
    "RewardError",
    "RhymeError",
    "RhymeModule",
    "RolloutBackend",
    "RolloutLoop",
    "RolloutRequest",
    "RolloutSettings",
    "RunError",
    "Sample",
    "SamplingParams",
    "Scheduler",
    "Task",
    "UpdateSettings",
    "UsageError",
    "__version__",
]

_HOMES = {
    "Algorithm": "algos.base",
    "EmbeddedBackend": "backends.embedded",
    "GRPO": "algos.grpo",
    "NoDrafter": "drafters.none",
    "PolicySource": "policy",
    "PromptDataModule": "data",
    "Reward": "rewards",
    "RhymeModule": "module",
    "RolloutBackend": "backends.base",
    "RolloutLoop": "rollout",
    "RolloutSettings": "rollout",
    "Task": "tasks",
    "UpdateSettings": "update",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # pyproject.toml is the one place that says it

        return version("rhymerl")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
