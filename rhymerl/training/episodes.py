"""The episodes of a module that has an environment: what its workers get, and what is checked before any compute."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from rhymerl.data import PromptDataModule
from rhymerl.distributed.first import is_first_rank
from rhymerl.environments.build import EpisodeSettings
from rhymerl.environments.proof import prove
from rhymerl.models.policy import Policy
from rhymerl.rollout import RolloutSettings

_LOG = logging.getLogger(__name__)


class Agent(Protocol):
    """The part of a RhymeModule that episodes follow from."""

    policy: Policy
    rollout: RolloutSettings
    environment_workers: int


def episode_settings(
    environment: Any, module: Agent, datamodule: PromptDataModule, *, longest_tokens: int
) -> EpisodeSettings | None:
    """Return what workers need for episodes; None where answers are of one turn.

    Raises ConfigError where the chat template cannot carry replies; says, on rank 0, where it does more than append them.
    """
    if environment is None:
        return None
    policy, rollout = module.policy, module.rollout
    settings = EpisodeSettings(
        environment=environment,
        tokenizer=policy.tokenizer,
        chat_template_kwargs=datamodule.template_arguments,
        stop_token_ids=(*policy.stop_token_ids, *rollout.stop_token_ids),
        max_turns=rollout.max_turns,
        max_turn_tokens=rollout.max_turn_tokens,
        max_reply_tokens=rollout.max_reply_tokens,
        reply_timeout_s=rollout.reply_timeout_s,
        longest_tokens=longest_tokens,
        num_processes=module.environment_workers,
    )
    if any(prompt.is_chat for prompt in datamodule.prompts):
        has_tools = bool(getattr(environment, "tool_schemas", ()))
        difference = prove(settings.encoder(), ["tool"] if has_tools else ["user"])
        if difference is not None and is_first_rank():
            _LOG.warning("environment: %s", difference)
    return settings
