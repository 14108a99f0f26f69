"""Forward passes without gradient over all samples of a step, shared among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymerl.distributed.base import Ranks
from rhymerl.models.logprobs import TokenBatch, token_batch
from rhymerl.training.batches import micro_batches
from rhymerl.training.dealing import deal_samples
from rhymerl.types import Sample

Work = Callable[[TokenBatch], Tensor]  # -> [B, T]


def over_samples(
    samples: Sequence[Sample],
    work: Work,
    *,
    ranks: Ranks,
    device: torch.device | str,
    max_tokens: int,
    behind: bool = False,
    shares: bool = False,
) -> Tensor:
    """Return what `work` says of every response token, [B, T] in float64 with zeros in the padding, in the host's memory.

    With `behind` it also has what `work` says behind the last one, [B, T + 1]. This is a collective: each rank does the
    work for its share of the samples, and gets the whole. With `shares` equal prompts are computed once.
    """
    dealt = deal_samples(samples, range(len(samples)), ranks.size, shares=shares)
    mine = dealt[ranks.rank]
    lines = _lines(samples, mine, work, ranks=ranks, device=device, max_tokens=max_tokens, behind=behind, shares=shares)
    gathered = ranks.gather(lines)
    whole = np.zeros((len(samples), max(map(len, samples)) + behind))
    for mine, flat in zip(dealt, gathered, strict=True):
        ends = np.cumsum([len(samples[i]) + behind for i in mine], dtype=np.int64)
        for i, line in zip(mine, np.split(flat, ends[:-1]), strict=bool(mine)):
            whole[i, : len(line)] = line
    return torch.from_numpy(whole)


def _lines(
    samples: Sequence[Sample],
    mine: Sequence[int],
    work: Work,
    *,
    ranks: Ranks,
    device: torch.device | str,
    max_tokens: int,
    behind: bool,
    shares: bool,
) -> npt.NDArray[np.floating]:
    """Return the values of the samples at `mine`, in that order and one after the other, without padding."""
    lines: dict[int, npt.NDArray[np.floating]] = {}
    with torch.no_grad():
        for part in micro_batches(samples, mine, max_tokens, shares=shares):
            ranks.check()
            batch = token_batch([samples[i] for i in part], device, behind=behind, shares=shares)
            found = work(batch).cpu().numpy()
            lines.update({i: line[: len(samples[i]) + behind] for i, line in zip(part, found, strict=True)})
    return np.concatenate([lines[i] for i in mine]) if mine else np.empty(0)
