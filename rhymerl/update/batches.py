"""How a step's samples are laid out and split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from rhymerl.algos.base import Batch
from rhymerl.types import Sample

_SPREAD = 1.5  # the longest of a micro-batch is at most so many times as long as the shortest,
_SMALL_TOKENS = 512  # unless it is small, and costs about as much as an empty one


def step_batch(samples: Sequence[Sample]) -> Batch:
    """All samples of a step, in the host's memory."""
    width = max(map(len, samples))
    shape = (len(samples), width)
    mask, logprobs = np.zeros(shape, np.bool_), np.zeros(shape)
    for i, sample in enumerate(samples):
        mask[i, : len(sample)] = sample.loss_mask
        logprobs[i, : len(sample)] = sample.completion.logprobs
    number: dict[str, int] = {}
    completions = [sample.completion for sample in samples]
    return Batch(
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        groups=torch.tensor([number.setdefault(sample.prompt.id, len(number)) for sample in samples]),
        mask=torch.from_numpy(mask),
        behaviour_logprobs=torch.from_numpy(logprobs),
        limits=torch.tensor([completion.request.sampling.max_tokens for completion in completions]),
        is_truncated=torch.tensor([completion.finish_reason == "length" for completion in completions]),
    )


def total_tokens(sample: Sample) -> int:
    """Prompt and response."""
    return len(sample.prompt.token_ids) + len(sample)


def micro_batches(samples: Sequence[Sample], chosen: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Split `chosen` into lists of like length whose padded size stays within `max_tokens` (one sample always fits)."""
    width = {i: total_tokens(samples[i]) for i in chosen}
    current: list[int] = []
    for i in sorted(chosen, key=lambda i: (-width[i], i)):
        if current:
            longest = width[current[0]]
            is_full = (len(current) + 1) * longest > max_tokens
            if is_full or (width[i] * _SPREAD < longest and len(current) * longest >= _SMALL_TOKENS):
                yield current
                current = []
        current.append(i)
    if current:
        yield current
