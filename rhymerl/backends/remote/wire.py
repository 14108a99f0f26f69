"""The wire format of requests to SGLang, as `custom_params`, and of its answers, as completions."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from rhymerl.types import IntArray, Output, Prompt, RolloutRequest, SamplingParams, Split

KEY = "rhymerl"  # in custom_params
_TEXTS, _COUNTS = ("id", "prompt_id", "prompt_key"), ("sample", "offset", "segment", "feed", "num_tokens")
_SEED = re.compile(r"-?[0-9]{1,20}")
_PACKED = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_log = logging.getLogger(__name__)


def to_custom_params(request: RolloutRequest, *, feed: int, num_tokens: int = 0) -> dict[str, Any]:
    """Return the request without tokens and sampling parameters; `feed` is the version its drafter needs.

    Tokens below `num_tokens` are sampled; 0: all that the model has.
    """
    prefetched = {} if request.prefetched is None else {"prefetched": _packed(request.prefetched)}
    return {
        KEY: {
            "id": request.id,
            "sample": request.sample,
            "seed": str(request.seed),  # 64 bits, more than JSON's numbers are good for everywhere
            "split": request.split,
            "prompt_id": request.prompt.id,
            "prompt_key": request.prompt.key,
            "offset": len(request.output) if request.output is not None else 0,
            "segment": request.segment,
            "feed": feed,
            "num_tokens": num_tokens,
            **prefetched,
        }
    }


def from_custom_params(
    params: Mapping[str, Any] | None, rid: str, token_ids: Sequence[int], sampling: SamplingParams
) -> RolloutRequest:
    """Return the request, rebuilt from SGLang's own: its id and its input (prompt and tokens generated before).

    The log-probs of earlier tokens stay in the trainer: they are NaN here. Nor does the prompt have its text and
    columns. A request that is not ours, or whose parameters are not as they should be, is known by its prompt's tokens
    alone.
    """
    tokens = np.array(token_ids, np.int32)
    own = _own(params) or _of_others(rid, tokens)
    prompt, answer = np.split(tokens, [max(len(tokens) - own["offset"], 0)])
    return RolloutRequest(
        id=own["id"],
        prompt=Prompt(id=own["prompt_id"], key=own["prompt_key"], token_ids=prompt, text=""),
        sample=own["sample"],
        seed=int(own["seed"]),
        sampling=sampling,
        split=own["split"],
        output=without_logprobs(answer) if len(answer) else None,
        prefetched=_unpacked(own["prefetched"]) if "prefetched" in own else None,
        segment=own["segment"],
    )


def _packed(token_ids: IntArray) -> str:
    """Pack token ids as text: between SGLang's processes a mapping in custom_params holds no lists."""
    return base64.b64encode(np.asarray(token_ids, "<i4").tobytes()).decode()


def _unpacked(text: str) -> IntArray:
    return np.frombuffer(base64.b64decode(text), "<i4").astype(np.int32)


def _of_others(rid: str, tokens: IntArray) -> dict[str, Any]:
    key = "other-" + _hash(tokens.tobytes()).hex()
    named = {"id": rid, "prompt_id": key, "prompt_key": key, "seed": _seed_of(rid), "split": "train"}
    return {**named, **dict.fromkeys(_COUNTS, 0)}


def _seed_of(rid: str) -> int:
    return int.from_bytes(_hash(rid.encode()), "little")


def noise_of(params: Mapping[str, Any] | None, rid: str) -> tuple[int, int]:
    """Return the seed of a request's noise, and how many tokens of its input are response already."""
    own = _own(params)
    if own is None and isinstance(params, Mapping) and params.get(KEY):
        _log.warning("rhymerl: request %s has malformed custom_params[%r] and is sampled as if it had none", rid, KEY)
    return (int(own["seed"]), own["offset"]) if own else (_seed_of(rid), 0)


def feed_of(params: Mapping[str, Any] | None) -> int:
    """Return the number of the feed that the drafter has to have read before."""
    own = _own(params)
    return own["feed"] if own else 0


def num_tokens_of(params: Mapping[str, Any] | None) -> int:
    """Return how many tokens may be sampled; 0: no word of that."""
    own = _own(params)
    return own["num_tokens"] if own else 0


def _own(params: Any) -> dict[str, Any] | None:
    """Return what `to_custom_params` has written, or None: a server's clients may send anything.

    An exception in SGLang's scheduler would end the engine.
    """
    own = params.get(KEY) if isinstance(params, Mapping) else None
    if not isinstance(own, Mapping):
        return None
    held: dict[str, Any] = {
        name: own.get(name) for name in (*_TEXTS, *_COUNTS, "seed", "split", *{"prefetched"} & own.keys())
    }
    is_sound = (
        all(isinstance(held[name], str) for name in _TEXTS)
        and all(type(held[name]) is int and 0 <= held[name] < 2**31 for name in _COUNTS)
        and _SEED.fullmatch(str(held["seed"])) is not None
        and held["split"] in get_args(Split)
        and ("prefetched" not in held or _is_packed(held["prefetched"]))
    )
    return held if is_sound else None


def _is_packed(text: object) -> bool:
    """Return whether it is base64 of whole tokens."""
    if not isinstance(text, str) or len(text) % 4 or not _PACKED.fullmatch(text):
        return False
    return (len(text) // 4 * 3 - text.count("=")) % 4 == 0


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()


def without_logprobs(token_ids: IntArray) -> Output:
    """Tokens of which only the trainer knows log-probs (NaN) and versions (-1)."""
    return Output.of(token_ids, logprob=np.nan, policy_version=-1)
