"""Prompts to answer without training on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from rhymerl.data.encoding import LengthLimits, PromptEncoder, check_template_arguments, encode_rows, with_tools
from rhymerl.data.sources import DataSource, read_rows
from rhymerl.errors import ConfigError, at_least, check_ranges
from rhymerl.models.chat import ChatTokenizer
from rhymerl.models.policy import Policy
from rhymerl.tasks.base import Task
from rhymerl.types import Prompt


@dataclass(eq=False)
class PromptSource:
    """The source of prompts: what `rhymerl.data.read_rows` takes, else the training problems of a task.

    Each is to get `samples` answers. `system_prompt` and `filter_overlong_prompts` are as in PromptDataModule.
    """

    prompts: DataSource | None = None
    _: KW_ONLY
    task: Task | None = None
    samples: int = at_least(1, 4)
    prompt_column: str = "prompt"
    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    max_prompt_tokens: int | None = at_least(1, None)
    filter_overlong_prompts: bool = False
    chat: ChatTokenizer = field(init=False, repr=False)  # what has rendered the prompts, once they are read

    def __post_init__(self) -> None:
        check_ranges(self)
        check_template_arguments(self.chat_template_kwargs)

    def read(self, policy: Policy, *, max_tokens: int, tools: Sequence[Mapping[str, Any]] = ()) -> list[Prompt]:
        """Read, encode and check every prompt; `max_tokens` of an answer must fit behind it.

        `tools` are an environment's, as JSON schemas. Raises ConfigError and DataError.
        """
        if self.prompts is None and self.task is None:
            raise ConfigError(
                "data.prompts=null: name a .jsonl, .csv or .parquet file or a data set with prompts, or a task (task=running_sum)"
            )
        source = self.prompts if self.prompts is not None else self.task.rows("train") if self.task is not None else []
        encoder = PromptEncoder(
            policy.tokenizer,
            prompt_column=self.prompt_column,
            system_prompt=self.system_prompt,
            chat_template_kwargs=with_tools(self.chat_template_kwargs, tools),
        )
        limits = LengthLimits(
            context_tokens=policy.context_tokens,
            max_tokens=max_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
            drops_longer=self.filter_overlong_prompts,
        )
        self.chat = encoder.chat
        prompts = encode_rows(read_rows(source, "data.prompts"), encoder, limits)
        encoder.warn()
        return prompts
