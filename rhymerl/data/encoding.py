"""Encode rows as prompts: chat template, tokens, ids and keys, and every check that needs the tokenizer."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
from transformers import PreTrainedTokenizerBase

from rhymerl.data.base import PROMPT_COLUMN, LocatedRow, prompt_in
from rhymerl.distributed.first import is_first_rank
from rhymerl.errors import ConfigError, DataError
from rhymerl.models.chat import ChatTokenizer, check_messages
from rhymerl.types import IntArray, Prompt

_LOG = logging.getLogger(__name__)
_FIXED_TEMPLATE_ARGUMENTS = ("tokenize", "add_generation_prompt", "return_tensors", "return_dict")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimits:
    """Limits of a prompt's length in tokens: its own, and the context, which must hold the longest answer too."""

    context_tokens: int  # of the model: prompt and response together
    max_tokens: int  # of a response
    max_prompt_tokens: int | None = None
    setting: str = "rollout.max_tokens"
    drops_longer: bool = False  # prompts that are too long are left out, with a word on how many

    def problem(self, num_tokens: int) -> str | None:
        """Return what is wrong with a prompt of `num_tokens`; None where it fits."""
        found = f"the prompt has {num_tokens} tokens"
        if self.max_prompt_tokens is not None and num_tokens > self.max_prompt_tokens:
            return f"{found}, more than data.max_prompt_tokens={self.max_prompt_tokens}"
        if num_tokens >= self.context_tokens:
            return (
                f"{found}: no room for an answer in the model's context of {self.context_tokens}; "
                "shorten the prompt or set model.path to a model with a longer context"
            )
        if num_tokens + self.max_tokens > self.context_tokens:
            return (
                f"{found}; with {self.setting}={self.max_tokens} that exceeds the model's context of "
                f"{self.context_tokens}: set {self.setting} to at most {self.context_tokens - num_tokens}"
            )
        return None


class PromptEncoder:
    """Turns one row into token ids the way the model will see it.

    Chat messages go through the tokenizer's template with its generation prompt; the template writes every special
    token itself. A string gets the special tokens that the tokenizer puts in front (such as BOS, unless the string
    already begins with it) and none behind. With a `system_prompt` a string is the user's message behind it, and
    messages get it in front unless they begin with one of their own. A template's `strftime_now` tells the time of
    `started`. Raises ValueError, see `check_template_arguments`, and ConfigError for a system prompt without a
    template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_column: str = PROMPT_COLUMN,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        started: datetime.datetime | None = None,  # now by default
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = ChatTokenizer(tokenizer, chat_template_kwargs=chat_template_kwargs, started=started)
        self.prompt_column = prompt_column
        self.system_prompt = system_prompt
        if system_prompt is not None and not tokenizer.chat_template:
            raise ConfigError(
                f"data.system_prompt={system_prompt!r}: the tokenizer has no chat template, which would say where it goes; "
                "expected null, or an instruction-tuned model (model.path)"
            )
        check_template_arguments(chat_template_kwargs)
        self.fingerprint = tokenizer_fingerprint(tokenizer, self.chat.chat_template_kwargs)
        self.plain_text_at: str | None = None  # place of the first prompt that goes past the tokenizer's chat template

    def encode(self, located: LocatedRow, *, prompt_id: str) -> Prompt:
        """Raises DataError, naming the row, when it has no prompt or one that cannot be encoded."""
        prompt = prompt_in(located, self.prompt_column)
        if self.system_prompt is not None and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str):
            prompt = self._checked(prompt, located.location)
        text, token_ids = self._tokenize(prompt, located.location)
        if not len(token_ids):
            raise DataError(f"{located.location}: the prompt is empty; expected at least one token")
        self.chat.check_known(text, token_ids, f"{located.location}: the prompt")
        token_ids.flags.writeable = False
        return Prompt(
            id=prompt_id,
            key=hashlib.blake2b(self.fingerprint + token_ids.tobytes(), digest_size=16).hexdigest(),
            token_ids=token_ids,
            text=text,
            columns={name: value for name, value in located.row.items() if name not in (self.prompt_column, "id")},
            messages=() if isinstance(prompt, str) else prompt,
            location=located.location,
        )

    def warn(self) -> None:
        """Say, on rank 0, what may surprise people in the prompts that have been encoded."""
        if self.plain_text_at is not None and is_first_rank():
            _LOG.warning(
                "%s: %r is plain text, which a model with a chat template gets as it is, without any sign of whose turn it is; write "
                'it as [{"role": "user", "content": "..."}] unless the model is to go on with the text',
                self.plain_text_at,
                self.prompt_column,
            )

    def _tokenize(self, prompt: str | list[Mapping[str, Any]], location: str) -> tuple[str, IntArray]:
        where = f"{location}: the prompt"
        if not isinstance(prompt, str):
            text = self.chat.render(prompt, location)
            return text, self.chat.token_ids(text, where)
        if self.tokenizer.chat_template and self.plain_text_at is None:
            self.plain_text_at = location
        begins_itself = bool(self.tokenizer.bos_token) and prompt.startswith(str(self.tokenizer.bos_token))
        return prompt, self.chat.token_ids(prompt, where, add_special_tokens=not begins_itself)

    def _checked(self, given: object, location: str) -> list[Mapping[str, Any]]:
        what = f"{location}: {self.prompt_column!r}"
        messages = check_messages(given, what)
        if messages[-1]["role"] == "assistant":
            raise DataError(
                f"{what} ends with a turn of the assistant, which is the policy's to write; leave it out, and put what a reward "
                "needs of it into a column such as 'answer'"
            )
        if self.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        self.chat.check_template(f"{location}: the prompt")
        return messages


def encode_rows(rows: Iterable[LocatedRow], encoder: PromptEncoder, limits: LengthLimits) -> list[Prompt]:
    """Encode and check every row. A prompt's id is the row's `id`, else a hash of the row.

    A row that repeats an earlier one word for word is kept, as `<id>#2`, `<id>#3` and so on: repeating rows is how data
    sets weigh them. Different rows with one id are a DataError; so are prompts that are too long, unless `limits` drop
    them.
    """
    long: list[str] = []
    locations: dict[str, str] = {}  # by final id
    copies: dict[tuple[str, bytes], int] = {}
    prompts = []
    for located in rows:
        digest = hashlib.blake2b(canonical_json(located.row, located.location).encode(), digest_size=8).digest()
        base = _row_id(located, digest)
        copies[base, digest] = copy = copies.get((base, digest), 0) + 1
        prompt_id = base if copy == 1 else f"{base}#{copy}"
        if prompt_id in locations:
            raise DataError(
                f"{located.location}: id {prompt_id!r} is already that of a different row ({locations[prompt_id]})"
            )
        locations[prompt_id] = located.location
        prompt = encoder.encode(located, prompt_id=prompt_id)
        problem = limits.problem(len(prompt.token_ids))
        if problem is None:
            prompts.append(prompt)
        elif not limits.drops_longer:
            raise DataError(f"{located.location}: {problem}")
        else:
            long.append(f"{located.location}: {problem}")
    if long and not prompts:
        raise DataError(f"{long[0]}; all {len(long):,} prompts are too long")
    if long and is_first_rank():
        are = "prompts is" if len(long) == 1 else "prompts are"
        first = long[0].rpartition(": the prompt has")[0]
        _LOG.warning(
            "data.filter_overlong_prompts=true: %s of the %s %s too long and left out, the first at %s",
            f"{len(long):,}",
            f"{len(long) + len(prompts):,}",
            are,
            first,
        )
    return prompts


def check_template_arguments(chat_template_kwargs: Mapping[str, Any] | None) -> None:
    """Raise ValueError for template arguments that are fixed here, or that cannot be put in an order."""
    given = dict(chat_template_kwargs or {})
    for name in _FIXED_TEMPLATE_ARGUMENTS:
        if name in given:
            raise ValueError(f"chat_template_kwargs.{name}: this argument is fixed; remove it")
    try:
        json.dumps(given, sort_keys=True, default=str)  # as the fingerprint of the tokens does
    except TypeError as error:
        raise ValueError(f"chat_template_kwargs={given!r}: {error}") from error


def with_tools(chat_template_kwargs: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the user's chat template arguments, with the JSON schemas of an environment's tools, if it has any."""
    return {**(chat_template_kwargs or {}), **({"tools": list(tools)} if tools else {})}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any]) -> bytes:
    """Return a digest of everything that decides a prompt's tokens; equal for a tokenizer saved and loaded again."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        described: dict[str, Any] = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    else:
        described = json.loads(backend.to_str())
        described = {name: part for name, part in described.items() if name not in ("padding", "truncation")}
    parts = [
        described,
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
        chat_template_kwargs,
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _row_id(located: LocatedRow, digest: bytes) -> str:
    given = located.row.get("id")
    if isinstance(given, np.ndarray | np.generic):  # as a data frame has numbers
        given = given.tolist()
    if given is None:
        return digest.hex()
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise DataError(
            f"{located.location}: id={given!r} is of type {type(given).__name__}; expected a string or an integer"
        )
    return str(given)


def canonical_json(row: Mapping[str, Any], location: str) -> str:
    """Return the same text for equal rows in every process. Raises DataError naming a column that has none."""
    try:
        return _dumped(row)
    except (TypeError, ValueError, RecursionError):
        for name, value in row.items():
            try:  # keys that JSON does not know, such as a UUID, become text
                _dumped(_with_text_keys(value))
            except (TypeError, ValueError, RecursionError) as error:
                raise DataError(f"{location}: the column {name!r} has {error}, which no hash can be made of") from error
    return _dumped(_with_text_keys(row))


def _dumped(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _with_text_keys(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list | tuple) else value


def _plain(value: object) -> Any:
    """Return plain JSON values for what parquet and numpy hold beyond JSON."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Decimal | datetime.timedelta | UUID):
        return str(value)
    raise TypeError(f"a {type(value).__name__} ({value!r:.80})")
