"""Prompts and answers, or a history's changes, as a few flat columns of bytes: for checkpoints, files, messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rhymerl.history.records import ANSWER_ENDS, SPLITS, Answer, HistoryDelta, PromptChange
from rhymerl.types import IntArray, Split

Sections = dict[str, bytearray]

_OF_PROMPTS = {"prompt_lengths": "<i8", "num_answers": "<i8"}  # one number a prompt
_OF_ANSWERS = {  # one number an answer
    "lengths": "<i8",
    "rewards": "<f8",
    "advantages": "<f8",
    "finish_reasons": "u1",  # index into ANSWER_ENDS
    "policy_versions": "<i8",
    "epochs": "<i8",
    "samples": "<i8",
}
_OF_TOKENS = {"prompt_tokens": "<i4", "tokens": "<i4"}
_CHANGES = "changes"  # [1 + prompts, 2] version and is_snapshot of a delta, then first_epoch and is_forgotten of each
_COLUMNS = {**_OF_PROMPTS, **_OF_ANSWERS, **_OF_TOKENS}
_TYPES = {**_COLUMNS, _CHANGES: "<i8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPrompt:
    """A prompt with its answers."""

    split: Split
    key: str
    token_ids: IntArray  # [P]
    answers: tuple[Answer, ...]


def pack(prompts: Iterable[PackedPrompt]) -> Sections:
    """Return one column of bytes a field, little-endian, prompts and answers in their order."""
    listed = list(prompts)
    answers = [answer for prompt in listed for answer in prompt.answers]
    columns: dict[str, Any] = {
        "prompt_lengths": [len(prompt.token_ids) for prompt in listed],
        "num_answers": [len(prompt.answers) for prompt in listed],
        "lengths": [len(answer) for answer in answers],
        "rewards": [answer.reward for answer in answers],
        "advantages": [answer.advantage for answer in answers],
        "finish_reasons": [ANSWER_ENDS.index(answer.finish_reason) for answer in answers],
        "policy_versions": [answer.policy_version for answer in answers],
        "epochs": [answer.epoch for answer in answers],
        "samples": [answer.sample for answer in answers],
        "prompt_tokens": _joined([prompt.token_ids for prompt in listed]),
        "tokens": _joined([answer.token_ids for answer in answers]),
    }
    names = json.dumps([(prompt.split, prompt.key) for prompt in listed]).encode()
    return {
        "names": bytearray(names),
        **{name: bytearray(np.asarray(column, _COLUMNS[name]).tobytes()) for name, column in columns.items()},
    }


def unpack(sections: Mapping[str, Any]) -> list[PackedPrompt]:
    """Return the inverse of `pack`; values are buffers. Raises ValueError when they do not fit together."""
    names = _names(sections)
    columns = {name: _column(sections, name) for name in _COLUMNS}
    _check_lengths(columns, len(names))
    answers = _answers(columns)
    prompt_tokens = _pieces(columns["prompt_tokens"], columns["prompt_lengths"])
    return [
        PackedPrompt(split=split, key=key, token_ids=tokens, answers=tuple(next(answers) for _ in range(count)))
        for (split, key), tokens, count in zip(names, prompt_tokens, columns["num_answers"].tolist(), strict=True)
    ]


def pack_delta(delta: HistoryDelta) -> Sections:
    """Columns as of `pack`, and one more."""
    prompts = [
        PackedPrompt(split=each.split, key=each.key, token_ids=each.prompt_token_ids, answers=each.added)
        for each in delta
    ]
    lines = [(delta.version, delta.is_snapshot), *((each.first_epoch, each.is_forgotten) for each in delta)]
    return {**pack(prompts), _CHANGES: bytearray(np.array(lines, _TYPES[_CHANGES]).tobytes())}


def unpack_delta(sections: Mapping[str, Any]) -> HistoryDelta:
    """Return the inverse of `pack_delta`. Raises ValueError as `unpack` does."""
    prompts, numbers = unpack(sections), _column(sections, _CHANGES)
    if len(numbers) != 2 * (1 + len(prompts)) or (numbers < 0).any() or (numbers[1::2] > 1).any():
        raise ValueError(f"its column {_CHANGES!r} does not fit its prompts, or has a number that is none of a change")
    (version, is_snapshot), *lines = numbers.reshape(-1, 2).tolist()
    changes = (
        PromptChange(
            split=prompt.split,
            key=prompt.key,
            is_forgotten=bool(is_forgotten),
            first_epoch=first_epoch,
            prompt_token_ids=prompt.token_ids,
            added=prompt.answers,
        )
        for prompt, (first_epoch, is_forgotten) in zip(prompts, lines, strict=True)
    )
    return HistoryDelta(version=version, is_snapshot=bool(is_snapshot), changes=tuple(changes))


def _joined(arrays: list[IntArray]) -> IntArray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)


def _names(sections: Mapping[str, Any]) -> list[tuple[Split, str]]:
    try:
        names = [(split, key) for split, key in json.loads(bytes(sections["names"]))]
        distinct = set(names)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise ValueError("its list of prompts cannot be read") from error
    if len(distinct) < len(names) or any(split not in SPLITS or not isinstance(key, str) for split, key in names):
        raise ValueError("its list of prompts has a prompt twice, or an unknown split")
    return names


def _column(sections: Mapping[str, Any], name: str) -> npt.NDArray[Any]:
    try:
        return np.frombuffer(sections[name], _TYPES[name])
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"its column {name!r} is missing or broken") from error


def _check_lengths(columns: Mapping[str, npt.NDArray[Any]], num_prompts: int) -> None:
    for name in ("prompt_lengths", "num_answers", "lengths", "prompt_tokens", "tokens", "epochs", "samples"):
        if (columns[name] < 0).any():
            raise ValueError(f"its column {name!r} has a negative number")
    for name in ("epochs", "samples", "policy_versions", "prompt_lengths", "num_answers", "lengths"):
        if (columns[name] >= 2**31).any():
            raise ValueError(f"its column {name!r} has a number that no run gets to")
    expected = {
        **dict.fromkeys(_OF_PROMPTS, num_prompts),
        **dict.fromkeys(_OF_ANSWERS, int(columns["num_answers"].sum())),
        "prompt_tokens": int(columns["prompt_lengths"].sum()),
        "tokens": int(columns["lengths"].sum()),
    }
    for name, length in expected.items():
        if len(columns[name]) != length:
            raise ValueError(f"its column {name!r} has {len(columns[name])} entries instead of {length}")
    if (columns["finish_reasons"] >= len(ANSWER_ENDS)).any():
        raise ValueError("its column 'finish_reasons' has an unknown reason")


def _pieces(tokens: IntArray, lengths: npt.NDArray[np.int64]) -> list[IntArray]:
    ends = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    return [tokens[start:end] for start, end in pairwise(ends)]


def _answers(columns: Mapping[str, npt.NDArray[Any]]) -> Iterator[Answer]:
    tokens = _pieces(columns["tokens"], columns["lengths"])
    fields = [columns[name].tolist() for name in _OF_ANSWERS if name != "lengths"]
    for token_ids, reward, advantage, end, policy_version, epoch, sample in zip(tokens, *fields, strict=True):
        yield Answer(
            token_ids=token_ids,
            reward=reward,
            advantage=advantage,
            finish_reason=ANSWER_ENDS[end],
            policy_version=policy_version,
            epoch=epoch,
            sample=sample,
        )
