"""Requests and finished answers of given lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from rhymerl.schedulers import Progress
from rhymerl.testing import make_prompt
from rhymerl.types import Completion, Output, RolloutRequest, Sample, SamplingParams

PLAIN = SamplingParams(max_tokens=1000)


def requests_for(num_prompts: int, group_size: int = 1, *, max_tokens: int = 1000) -> list[RolloutRequest]:
    """Prompts "0", "1", ... with `group_size` requests each."""
    sampling = replace(PLAIN, max_tokens=max_tokens)
    return [
        RolloutRequest(
            id=f"{number}/{sample}",
            prompt=make_prompt([number, 1], id=str(number)),
            sample=sample,
            seed=0,
            sampling=sampling,
        )
        for number in range(num_prompts)
        for sample in range(group_size)
    ]


def answered(
    request: RolloutRequest,
    length: int,
    reason: Literal["stop", "length"] = "stop",
    *,
    passes: int = 0,
    drafted: int = 0,
) -> Sample:
    """An answer with so many tokens."""
    tokens = np.zeros(length, np.int32)
    completion = Completion(
        request=request,
        output=Output(
            token_ids=tokens,
            logprobs=np.zeros(length),
            policy_versions=tokens,
            finish_reason=reason,
            num_passes=passes,
            num_drafted=drafted,
        ),
    )
    return Sample(completion=completion, text="", reward=0.0, rewards={}, loss_mask=np.ones(length, np.bool_))


def samples_for(lengths: Sequence[Sequence[int]]) -> list[Sample]:
    """Answers of prompt 0, 1, ...; a length of 1000 is cut off."""
    requests = {request.id: request for request in requests_for(len(lengths), max(map(len, lengths), default=0))}
    return [
        answered(requests[f"{number}/{sample}"], length, "length" if length == 1000 else "stop")
        for number, group in enumerate(lengths)
        for sample, length in enumerate(group)
    ]


def progress_of(
    plan: Sequence[Sequence[RolloutRequest]], tokens: Sequence[Sequence[int | None]], *, step: int = 1
) -> Progress:
    """Return what is unfinished of a plan: tokens by worker and place, None = finished."""
    unfinished = [
        (request, worker, count)
        for worker, (queue, counts) in enumerate(zip(plan, tokens, strict=True))
        for request, count in zip(queue, counts, strict=True)
        if count is not None
    ]
    return Progress(
        step=step,
        planned=np.array([len(queue) for queue in plan]),
        requests=[request for request, _, _ in unfinished],
        workers=np.array([worker for _, worker, _ in unfinished], np.int64),
        num_tokens=np.array([count for _, _, count in unfinished], np.int64),
    )
