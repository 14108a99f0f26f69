"""An engine's answers about requests; shapes, types and ranges are checked here, before anything uses them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rhymerl.backends.remote.client import NoAnswerError
from rhymerl.errors import BackendError
from rhymerl.types import FloatArray, IntArray

_BEYOND = 1024  # tokens that a last pass may sample beyond what was asked for
_LEAST = float(np.finfo(np.float32).min)
_ROUNDING = 1e-3  # nats by which rounding may bring a log-prob above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer:
    """An answer, or a piece of one."""

    token_ids: IntArray  # [N]
    logprobs: FloatArray  # [N], NaN where the engine has none
    num_verified: int  # passes after those that read the prompt
    reason: str  # why it has ended, in the engine's words: "stop", "length", "abort"
    told: Mapping[str, Any]  # all that it says of the reason
    version: str | None  # of the weights

    @classmethod
    def of(cls, content: Any, *, of_whom: str, most: int, vocabulary: int) -> EngineAnswer:
        """Read at most `most` tokens, and a few that the last pass has sampled beyond them.

        Raises NoAnswerError for what is no JSON object, as a proxy's page in the place of the engine; BackendError for
        any other fault. Both begin with `of_whom`, the engine and the request.
        """
        if not isinstance(content, Mapping):
            raise NoAnswerError(f"{of_whom}: expected a JSON object, got {_shown(content)}")
        try:
            return cls._read(content, most=most, vocabulary=vocabulary)
        except _FaultError as fault:
            raise BackendError(f"{of_whom}: {fault}") from None

    @classmethod
    def _read(cls, content: Mapping[str, Any], *, most: int, vocabulary: int) -> EngineAnswer:
        meta = _kind_of(content.get("meta_info"), Mapping, "meta_info")
        told = _kind_of(meta.get("finish_reason"), Mapping, "meta_info.finish_reason")
        reason = _kind_of(told.get("type"), str, "meta_info.finish_reason.type")
        name = "meta_info.output_token_logprobs"
        pairs = _kind_of(meta.get("output_token_logprobs") or [], list, name)
        if len(pairs) > most + _BEYOND:
            raise _FaultError(f"{name} has {len(pairs)} tokens, {most} were asked for")
        token_ids, logprobs = (list(each) for each in zip(*map(_pair, pairs), strict=True)) if pairs else ([], [])
        beyond = [number for number in token_ids if not 0 <= number < vocabulary]
        if beyond:
            raise _FaultError(f"{name} has the token id {beyond[0]}, expected 0 to {vocabulary - 1}")
        wrong = [each for each in logprobs if each > _ROUNDING or -math.inf < each < _LEAST]
        if wrong:
            raise _FaultError(f"{name} has the log-prob {wrong[0]}, expected at most 0, and a number of float32")
        verified = meta.get("spec_verify_ct") or 0
        if type(verified) is not int or not 0 <= verified <= 2 * (most + _BEYOND):
            raise _FaultError(f"meta_info.spec_verify_ct is {_shown(verified)}, expected a count of its passes")
        version = meta.get("weight_version")
        if not isinstance(version, str) and (version is not None or token_ids):
            raise _FaultError(f"meta_info.weight_version is {_shown(version)}, expected the version of its weights")
        return cls(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.array(logprobs, np.float64),
            num_verified=verified,
            reason=reason,
            told=told,
            version=version,
        )


class _FaultError(Exception):
    """What is wrong with an answer."""


def _kind_of(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise _FaultError(
            f"{name} is {_shown(value)}, expected {'an object' if kind is Mapping else 'a ' + kind.__name__}"
        )
    return value


def _pair(pair: Any) -> tuple[int, float]:
    """Return a token and its log-prob; JSON has no NaN, there it is null."""
    is_pair = isinstance(pair, Sequence) and len(pair) >= 2 and type(pair[1]) is int
    if not is_pair or not (pair[0] is None or type(pair[0]) in (int, float)):
        raise _FaultError(f"meta_info.output_token_logprobs has {_shown(pair)}, expected [log-prob, token id, ...]")
    return pair[1], float("nan") if pair[0] is None else float(pair[0])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
