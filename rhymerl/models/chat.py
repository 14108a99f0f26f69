"""Chat templates and the tokens of rendered text: what prompts and the replies of environments share."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from rhymerl.errors import DataError
from rhymerl.types import IntArray

_TIME_CALL = re.compile(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""")


class ChatTokenizer:
    """A tokenizer with its chat template, which refuses what either of them cannot carry.

    A template's `strftime_now` tells the time of `started`. Methods raise DataError; its message begins with `where`,
    such as "row 1: the prompt".
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        started: datetime.datetime | None = None,  # now by default
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.started = started or datetime.datetime.now()
        self._unknown_id = _unknown_id(tokenizer)
        # With fewer tokens than bytes some characters have no token at all, and would vanish without a word.
        self._knows: dict[str, bool] | None = {} if len(tokenizer) < 256 else None

    def render(self, messages: object, location: str, *, add_generation_prompt: bool = True) -> str:
        """Return what the template makes of chat messages that `check_messages` has seen."""
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    cast(Any, messages),
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self._template_arguments,
                )
            )
        except TemplateError as error:
            reason = f"refuses these messages: {error}"
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            reason = f"fails on these messages: {type(error).__name__}: {error}"
        raise DataError(f"{location}: the tokenizer's chat template {' '.join(reason.split())}")

    def check_template(self, where: str, *, instead: str = "a string prompt") -> None:
        """Raise DataError for chat messages where the tokenizer has no template."""
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{where} is chat messages, but the tokenizer has no chat template; "
                f"use {instead} or an instruction-tuned model (model.path)"
            )

    def token_ids(self, text: str, where: str, *, add_special_tokens: bool = False) -> IntArray:
        """Return the text's tokens, int32 [P], with the special tokens that the tokenizer puts in front, not behind."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = ascii(text[error.start])
            raise DataError(f"{where} has {half}, half of a character, which no tokenizer can read") from error
        if not add_special_tokens:
            token_ids = self.tokenizer.encode(text, add_special_tokens=False, truncation=False, verbose=False)
            return np.asarray(token_ids, dtype=np.int32)
        encoded = self.tokenizer(text, return_special_tokens_mask=True, truncation=False, verbose=False)
        token_ids = encoded["input_ids"]
        end = len(token_ids)
        while end > 0 and encoded["special_tokens_mask"][end - 1]:  # 1 where the tokenizer added: drop those behind
            end -= 1
        return np.asarray(token_ids[:end], dtype=np.int32)

    def check_known(self, text: str, token_ids: IntArray, where: str) -> None:
        """Raise DataError that names the first part of the text for which the tokenizer has no token."""
        unknown = self._unknown_part(text, token_ids)
        if unknown is not None:
            raise DataError(f"{where} has {unknown!r}, which the tokenizer does not know")

    @property
    def uses_time(self) -> bool:
        """Return whether rendered text depends on when it is rendered."""
        return "strftime_now" in f"{self.tokenizer.chat_template}{self.chat_template_kwargs.get('chat_template')}"

    @property
    def _template_arguments(self) -> dict[str, Any]:
        """The user's, and a template in which the time stands that the run was started."""
        given = self.chat_template_kwargs
        if not self.uses_time:
            return given
        template = self.tokenizer.get_chat_template(given.get("chat_template"), given.get("tools"))
        dated = _TIME_CALL.sub(lambda call: json.dumps(self.started.strftime(call[2])), template)
        return {**given, "chat_template": dated}

    def _unknown_part(self, text: str, token_ids: IntArray) -> str | None:
        if self._knows is not None:
            for character in dict.fromkeys(text):
                if character not in self._knows:
                    self._knows[character] = bool(self.tokenizer.encode(character, add_special_tokens=False))
                if not self._knows[character]:
                    return character
        if self._unknown_id is None or self._unknown_id not in token_ids:
            return None
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return next((text[start:end] for token, (start, end) in pairs if token == self._unknown_id), text)


def check_messages(messages: object, what: str) -> list[Mapping[str, Any]]:
    """Return chat messages. Raises DataError that begins with `what` for anything else."""
    if not isinstance(messages, list) or not messages:
        given = "an empty list" if isinstance(messages, list) else f"of type {type(messages).__name__}"
        raise DataError(f"{what} is {given}; expected a string or a list of chat messages {{role, content}}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(f"{what}, message {number}: expected an object with the strings 'role' and 'content'")
    return messages


def _unknown_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id that stands for unknown text, of a word-level tokenizer only: others fall back on bytes."""
    from tokenizers.models import WordLevel

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, WordLevel):
        return None
    unknown: int | None = backend.token_to_id(backend.model.unk_token)
    return unknown
