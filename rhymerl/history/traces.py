"""Recorded rollouts: one JSON object a response, in a .jsonl or .jsonl.gz file."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from rhymerl.errors import ConfigError, DataError
from rhymerl.folders import read_lines, writing
from rhymerl.history.records import Answer
from rhymerl.types import WHOLE, BoolArray, FinishReason, FloatArray, IntArray, Sample

_NUM_TOKENS = 2**31  # ids are int32
_LONGEST_LINE_BYTES = 256 * 2**20  # of millions of tokens with log-probs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceRecord:
    """One response of a run."""

    epoch: int  # pass over the data, from 0
    prompt_id: str
    sample: int  # which of the group's answers, from 0
    prompt_tokens: IntArray  # [P]
    response_tokens: IntArray  # [L]
    reward: float
    finish_reason: FinishReason
    logprobs: FloatArray | None = None  # [L] behaviour log-probs, nats
    sampled: BoolArray | None = None  # [L] all but the replies of an environment; None where there are none
    parts: IntArray | None = None  # [K] where the prompts of an episode's later parts begin in it; None: there are none
    waits: FloatArray | None = None  # [T] seconds from the end of each turn to its reply; None where that is unknown
    prompt: str | None = None  # what was tokenized, for people; None where nobody has written it down
    response: str | None = None  # without special tokens

    @property
    def num_sampled(self) -> int:
        return len(self.response_tokens) if self.sampled is None else int(self.sampled.sum())


def record_of(sample: Sample, epoch: int, *, with_logprobs: bool = False, with_waits: bool = False) -> TraceRecord:
    """Return a sample as a record. Raises ValueError for an answer that was withdrawn half-way.

    `with_waits`, the record of an episode follows the clock, so that no run repeats it.
    """
    completion, turns = sample.completion, sample.completion.output.turns
    if not completion.output.is_finished:
        raise ValueError(f"request {completion.request.id} was withdrawn: only whole answers are recorded")
    begun = [turn.start for turn in turns if turn.rerendered is not None]
    return TraceRecord(
        epoch=epoch,
        prompt_id=sample.prompt.id,
        sample=completion.request.sample,
        prompt_tokens=sample.prompt.token_ids,
        response_tokens=completion.token_ids,
        reward=sample.reward if sample.has_reward else 0.0,
        finish_reason=completion.finish_reason,
        logprobs=completion.logprobs if with_logprobs else None,
        sampled=completion.output.sampled if turns else None,
        parts=np.array(begun, np.int32) if begun else None,
        waits=np.array([turn.waited_s for turn in turns]) if turns and with_waits else None,
        prompt=sample.prompt.text,
        response=sample.text,
    )


def record_of_past(answer: Answer, prompt_id: str, prompt_tokens: IntArray) -> TraceRecord:
    """Return an answer of the history as a record."""
    return TraceRecord(
        epoch=answer.epoch,
        prompt_id=prompt_id,
        sample=answer.sample,
        prompt_tokens=prompt_tokens,
        response_tokens=answer.token_ids,
        reward=answer.reward,
        finish_reason=answer.finish_reason,
    )


class TraceWriter:
    """Appends the records of one step after another; `path` ends in .gz to be compressed.

    A step is written as a whole, in .gz as a member of its own, and `num_bytes` then says how long the file is. Save
    that number with the run's state and give it back as `keep_bytes`: what was written later is cut off, and a resumed
    run leaves the very bytes that an uninterrupted one does. A killed run leaves whole lines and at most a part of one.

    Raises ConfigError when the file exists and `keep_bytes` is None, and DataError when it is shorter than
    `keep_bytes`.
    """

    def __init__(self, path: str | Path, *, keep_bytes: int | None = None) -> None:
        self.path = Path(path)
        self.num_bytes = keep_bytes or 0
        if keep_bytes is not None:
            _cut(self.path, keep_bytes)
        elif self.path.exists():
            raise ConfigError(f"trace {str(path)!r}: exists already; give another file, or remove it")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)  # nothing is left behind where a write fails

    def write(self, records: Iterable[TraceRecord]) -> None:
        """Append the records of one step and hand them to the operating system."""
        lines = "".join(_line_of(record) for record in records).encode()
        data = gzip.compress(lines, compresslevel=6, mtime=0) if self.path.suffix == ".gz" else lines
        with writing(self.path):
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        self.num_bytes += len(data)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self.close()


def read_trace(path: str | Path) -> Iterator[TraceRecord]:
    """Yield the records of a file, in its order; unknown fields are passed over.

    Raises DataError naming the file, the line and what is wrong, when iteration gets there.
    """
    location = f"trace {str(path)!r}"
    number = 0
    try:
        with gzip.open(path) if Path(path).suffix == ".gz" else Path(path).open("rb") as file:
            for line in read_lines(file, most_bytes=_LONGEST_LINE_BYTES):
                number += 1
                yield _parse(line, f"{location}, line {number}")
    except EOFError as error:
        raise DataError(f"{location}, line {number + 1}: the file is cut off here") from error
    except FileNotFoundError as error:
        raise DataError(f"{location}: no such file") from error
    except ValueError as error:  # a line that is too long
        raise DataError(f"{location}, line {number + 1}: {error}") from error
    except (OSError, zlib.error) as error:
        raise DataError(f"{location}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if number == 0:
        raise DataError(f"{location}: the file is empty")


def _cut(path: Path, num_bytes: int) -> None:
    found = path.stat().st_size if path.exists() else 0
    if found < num_bytes:
        raise DataError(
            f"trace {str(path)!r}: has {found} bytes, but {num_bytes} when the run was saved; start a new one"
        )
    if found:
        os.truncate(path, num_bytes)


def _line_of(record: TraceRecord) -> str:
    sampled = record.sampled.astype(int) if record.sampled is not None else None
    waits = record.waits.round(4) if record.waits is not None else None
    arrays = {"logprobs": record.logprobs, "sampled": sampled, "parts": record.parts, "waits": waits}
    fields: dict[str, Any] = {
        "epoch": int(record.epoch),
        "prompt_id": record.prompt_id,
        "sample": int(record.sample),
        "prompt_tokens": record.prompt_tokens.tolist(),
        "response_tokens": record.response_tokens.tolist(),
        "reward": float(record.reward),
        "finish_reason": record.finish_reason,
        **{name: array.tolist() for name, array in arrays.items() if array is not None},
    }
    texts = {"prompt": record.prompt, "response": record.response}
    fields |= {name: text for name, text in texts.items() if text is not None}
    return json.dumps(fields, separators=(",", ":")) + "\n"


def _parse(line: bytes, location: str) -> TraceRecord:
    if not line.endswith(b"\n"):
        raise DataError(f"{location}: the line is cut off")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # broken JSON and broken UTF-8 alike
        raise DataError(f"{location}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{location}: expected a JSON object, got {_shown(row)}")
    try:
        return _record(row)
    except ValueError as error:
        raise DataError(f"{location}: {error}") from error


def _record(row: dict[str, Any]) -> TraceRecord:
    response = _tokens(row, "response_tokens")
    return TraceRecord(
        epoch=_count(row, "epoch"),
        prompt_id=_typed(row, "prompt_id", str, "a string"),
        sample=_count(row, "sample"),
        prompt_tokens=_tokens(row, "prompt_tokens"),
        response_tokens=response,
        reward=float(_typed(row, "reward", (int, float), "a number")),
        finish_reason=_finish_reason(row),
        logprobs=None if row.get("logprobs") is None else _logprobs(row, len(response)),
        sampled=None if row.get("sampled") is None else _sampled(row, len(response)),
        parts=None if row.get("parts") is None else _parts(row),
        waits=None if row.get("waits") is None else _waits(row),
        prompt=_text(row, "prompt"),
        response=_text(row, "response"),
    )


def _text(row: dict[str, Any], name: str) -> str | None:
    return None if row.get(name) is None else str(_typed(row, name, str, "a string"))


def _typed(row: dict[str, Any], name: str, kind: type | tuple[type, ...], words: str) -> Any:
    if name not in row:
        raise ValueError(f"{name} is missing")
    value = row[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name}={_shown(value)}: expected {words}")
    return value


def _count(row: dict[str, Any], name: str) -> int:
    value: int = _typed(row, name, int, "an integer of 0 or more")
    if value < 0:
        raise ValueError(f"{name}={value}: expected an integer of 0 or more")
    return value


def _tokens(row: dict[str, Any], name: str) -> IntArray:
    values = _typed(row, name, list, "a list of token ids")
    if not set(map(type, values)) <= {int}:
        raise ValueError(f"{name}: expected a list of token ids, got {_shown(_first_other(values, int))} in it")
    if values and not 0 <= min(values) <= max(values) < _NUM_TOKENS:
        wrong = next(value for value in values if not 0 <= value < _NUM_TOKENS)
        raise ValueError(f"{name}: {wrong} is no token id; expected 0 to {_NUM_TOKENS - 1}")
    return np.array(values, np.int32)


def _numbers(row: dict[str, Any], name: str) -> FloatArray:
    values = _typed(row, name, list, "a list of numbers")
    if not set(map(type, values)) <= {int, float}:
        raise ValueError(f"{name}: expected a list of numbers, got {_shown(_first_other(values, int, float))} in it")
    return np.array(values, np.float64)


def _logprobs(row: dict[str, Any], length: int) -> FloatArray:
    values = _numbers(row, "logprobs")
    if len(values) != length:
        raise ValueError(f"logprobs: expected one a response token, {length}, got {len(values)}")
    return values


def _waits(row: dict[str, Any]) -> FloatArray:
    values = _numbers(row, "waits")
    if not len(values) or not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError("waits: expected the seconds that each turn waited, 0 or more")
    return values


def _sampled(row: dict[str, Any], length: int) -> BoolArray:
    values = _typed(row, "sampled", list, "a list of 0 and 1")
    if not set(map(type, values)) <= {int} or not set(values) <= {0, 1} or len(values) != length:
        raise ValueError(f"sampled: expected 0 or 1 for each response token, {length} of them")
    return np.array(values, np.bool_)


def _parts(row: dict[str, Any]) -> IntArray:
    places, sampled = _tokens(row, "parts"), np.array([1, *(row.get("sampled") or ())])
    if not set(places.tolist()) <= set(np.flatnonzero(np.diff(sampled) < 0).tolist()):
        raise ValueError("parts: expected places of response tokens at which replies begin, by `sampled`")
    return places


def _finish_reason(row: dict[str, Any]) -> Any:
    reason = _typed(row, "finish_reason", str, "a string")
    if reason not in WHOLE:
        raise ValueError(f"finish_reason={reason!r}: expected one of {', '.join(WHOLE)}")
    return reason


def _first_other(values: list[Any], *kinds: type) -> Any:
    return next(value for value in values if type(value) not in kinds)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
