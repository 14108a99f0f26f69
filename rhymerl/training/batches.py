"""The layout of a step's samples, and their split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rhymerl.algos.base import Batch
from rhymerl.compiled import compiled
from rhymerl.types import Sample

_OVERHEAD_TOKENS = 512  # what an empty micro-batch costs on a CPU: its many small operations


def step_batch(samples: Sequence[Sample]) -> Batch:
    """Return all samples of a step, in the host's memory."""
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


def micro_batches(samples: Sequence[Sample], chosen: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split `chosen` into lists of like length whose padded size stays within `max_tokens` (one sample always fits).

    Among all splits of the samples sorted by length, this is the one with the fewest padded tokens, each micro-batch counting for
    some more.
    """
    width = {i: total_tokens(samples[i]) for i in chosen}
    longest_first = sorted(chosen, key=lambda i: (-width[i], i))
    starts = np.empty(len(chosen) + 1, np.int64)
    _best_starts(np.array([width[i] for i in longest_first], np.int64), max_tokens, _OVERHEAD_TOKENS, starts)
    parts, end = [], len(chosen)
    while end:
        start = int(starts[end])
        parts.append(longest_first[start:end])
        end = start
    return parts[::-1]


@compiled
def _best_starts(widths: npt.NDArray[np.int64], max_tokens: int, overhead: int, starts: npt.NDArray[np.int64]) -> None:
    """starts[n] = where the last micro-batch begins in the best split of the first n samples, whose `widths` never grow."""
    cost = np.zeros(len(widths) + 1, np.int64)
    starts[0] = 0
    for end in range(1, len(widths) + 1):
        cost[end] = -1
        for start in range(end - 1, -1, -1):
            tokens = (end - start) * widths[start]
            if tokens > max_tokens and start < end - 1:
                break
            total = cost[start] + tokens + overhead
            if cost[end] < 0 or total < cost[end]:
                cost[end], starts[end] = total, start
