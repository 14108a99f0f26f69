"""The episodes of a run that has an environment: what its workers get, and what is checked before any compute."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rhymerl.environments.build import EpisodeSettings
from rhymerl.environments.proof import prove
from rhymerl.errors import ConfigError
from rhymerl.models.chat import ChatTokenizer
from rhymerl.models.policy import Policy
from rhymerl.rollout import RolloutSettings
from rhymerl.types import Prompt


def checked_episodes(
    environment: Any,
    policy: Policy,
    rollout: RolloutSettings,
    prompts: Sequence[Prompt],
    *,
    chat: ChatTokenizer,
    longest_tokens: int,
    num_processes: int,
) -> EpisodeSettings | None:
    """Return what workers need for episodes; None where answers are of one turn.

    Raises ConfigError for an environment that no other process can have, for tools whose results prompts cannot carry,
    and where the chat template cannot carry replies.
    """
    if environment is None:
        return None
    try:
        pickle.dumps(environment)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(f"environment: it cannot be sent to the processes that ask it: {error}") from error
    settings = EpisodeSettings(
        environment=environment,
        chat=chat,
        stop_token_ids=(*policy.stop_token_ids, *rollout.stop_token_ids),
        max_turns=rollout.max_turns,
        max_turn_tokens=rollout.max_turn_tokens,
        max_reply_tokens=rollout.max_reply_tokens,
        reply_timeout_s=rollout.reply_timeout_s,
        reply_memory_mb=rollout.reply_memory_mb,
        rerenders=rollout.history == "rerender",
        longest_tokens=longest_tokens,
        num_processes=num_processes,
    )
    has_tools = bool(getattr(environment, "tool_schemas", ()))
    plain = next((prompt for prompt in prompts if not prompt.is_chat), None)
    if has_tools and plain is not None:
        raise ConfigError(
            f"{plain.location}: the prompt is plain text, which shows the policy no tools and cannot carry their results; expected "
            "chat messages, or data.system_prompt"
        )
    if not any(prompt.is_chat for prompt in prompts):
        return settings
    role = "tool" if has_tools else "user"
    return replace(settings, remark=prove(settings.encoder(), [role], rerenders=settings.rerenders))
