"""Requests and what becomes of them, for the tests of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rhymerl.testing import make_prompt
from rhymerl.types import Completion, FinishReason, Output, Prompt, RolloutRequest, SamplingParams, Split


def request(prompt: Prompt, sample: int = 0, *, split: Split = "train", name: str | None = None) -> RolloutRequest:
    return RolloutRequest(
        id=name or f"{split}/{prompt.id}/{sample}",
        prompt=prompt,
        sample=sample,
        seed=sample,
        sampling=SamplingParams(max_tokens=10_000),
        split=split,
    )


def requests(prompt_tokens: Sequence[int], count: int) -> list[RolloutRequest]:
    prompt = make_prompt(prompt_tokens)
    return [request(prompt, sample) for sample in range(count)]


def generated(tokens: Sequence[int]) -> Output:
    ids = np.array(tokens, np.int32)
    return Output(token_ids=ids, logprobs=np.zeros(len(ids)), policy_versions=np.zeros(len(ids), np.int32))


def resumed(request: RolloutRequest, tokens: Sequence[int]) -> RolloutRequest:
    return replace(request, output=generated(tokens))


def completion(request: RolloutRequest, tokens: Sequence[int], reason: FinishReason = "stop") -> Completion:
    return Completion(request=request, output=replace(generated(tokens), finish_reason=reason))


def context(request: RolloutRequest, tokens: Sequence[int]) -> np.ndarray:
    """Read-only, as an engine may hand it out."""
    ids = np.array([*request.prompt.token_ids.tolist(), *tokens], np.int32)
    ids.flags.writeable = False
    return ids
