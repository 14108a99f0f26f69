"""The environment of a run, and what its workers make their episodes of."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rhymerl.config import instantiate
from rhymerl.environments.base import Environment, is_remembered
from rhymerl.environments.encoding import ReplyEncoder
from rhymerl.environments.episodes import Episodes
from rhymerl.environments.pool import EnvironmentPool
from rhymerl.environments.reply_cache import ReplyCache
from rhymerl.errors import ConfigError
from rhymerl.models.chat import ChatTokenizer
from rhymerl.tasks.base import Task

_LOG = logging.getLogger(__name__)


def prepared(given: Any, tokenizer: PreTrainedTokenizerBase) -> Environment | None:
    """Return an environment, or a config node's, prepared for this tokenizer. Raises ConfigError if it cannot be."""
    if given is None:
        return None
    environment: Environment = instantiate(given, key="environment", kind=Environment)
    try:
        return environment.prepare(tokenizer)
    except ValueError as error:
        raise ConfigError(f"environment.{error}") from error


def environment_of(given: Environment | None, task: Task | None) -> Any:
    """Return who replies when a turn has ended: `given`, else a task that replies, else None (answers of one turn)."""
    if given is not None:
        return given
    return task if task is not None and type(task).reply is not Task.reply else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """All that a worker needs for episodes of its own, wherever it is.

    The limits are those of RolloutSettings; `longest_tokens` may a prompt and its answer have together.
    """

    environment: Any
    chat: ChatTokenizer  # that of the prompts
    stop_token_ids: Sequence[int]
    max_turns: int
    max_turn_tokens: int | None
    max_reply_tokens: int
    reply_timeout_s: float
    reply_memory_mb: int
    rerenders: bool
    longest_tokens: int
    num_processes: int
    lockstep: bool = False  # nothing follows the clock
    remark: str | None = None  # how the chat template does more than append replies

    @property
    def words(self) -> str:
        """What turns follow from: under other words a run does not go on with episodes that had begun."""
        kind = type(self.environment)
        limits = self.max_turns, self.max_turn_tokens, self.max_reply_tokens
        return f"{kind.__module__}.{kind.__qualname__} {limits}{' rerender' if self.rerenders else ''}"

    def warn(self) -> None:
        """Say what is remarkable; called once a run, on rank 0."""
        if self.remark is not None:
            _LOG.warning("environment: %s", self.remark)

    def encoder(self) -> ReplyEncoder:
        return ReplyEncoder(self.chat, stop_token_ids=self.stop_token_ids, max_reply_tokens=self.max_reply_tokens)

    def _decode(self, token_ids: Any) -> str:
        return str(self.chat.tokenizer.decode(token_ids, skip_special_tokens=False))

    def episodes(self) -> Episodes:
        """Processes start with the first turn that ends."""
        remembers = self.reply_memory_mb and is_remembered(self.environment)
        pool = EnvironmentPool(
            self.environment,
            num_processes=self.num_processes,
            timeout_s=self.reply_timeout_s,
            memory=ReplyCache(self.reply_memory_mb * 2**20) if remembers else None,
        )
        return Episodes(
            pool,
            self.encoder(),
            decode=self._decode,
            context_tokens=self.longest_tokens,
            max_turns=self.max_turns,
            max_turn_tokens=self.max_turn_tokens,
            rerenders=self.rerenders,
            lockstep=self.lockstep,
        )
