"""Forward passes without gradient over all samples of a step, shared among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymerl.distributed.base import Ranks
from rhymerl.models.logprobs import TokenBatch, token_batch
from rhymerl.training.batches import Unit, passes_of, units
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
    in_step: bool = False,
) -> Tensor:
    """Return `work` for every response token, [B, T] in float64 with zeros in the padding, in host memory.

    With `behind` it also has `work` behind the last token, [B, T + 1]. This is a collective: each rank does the work
    for its share of the samples, and gets the whole. With `shares` shared prefixes are computed once. If `work` is a
    collective itself, ranks make equally many passes (`in_step`).
    """
    dealt = balance_samples(samples, range(len(samples)), ranks.size, shares=shares)
    passes = passes_of(ranks.rank, samples, dealt, max_tokens, shares=shares, in_step=in_step)
    lines: dict[int, npt.NDArray[np.floating]] = {}  # without padding
    with torch.no_grad():
        for each in passes:
            ranks.check()
            batch = token_batch([samples[i] for i in each.samples], device, behind=behind, shares=shares)
            found = work(batch).cpu().numpy()
            if not each.is_idle:
                rows = zip(each.samples, found, strict=True)
                lines.update({i: row[: len(samples[i]) + behind] for i, row in rows})
    gathered = ranks.gather(np.concatenate([lines[i] for i in dealt[ranks.rank]]) if lines else np.empty(0))
    whole = np.zeros((len(samples), max(map(len, samples)) + behind))
    for mine, flat in zip(dealt, gathered, strict=True):
        ends = np.cumsum([len(samples[i]) + behind for i in mine], dtype=np.int64)
        for i, line in zip(mine, np.split(flat, ends[:-1]), strict=bool(mine)):
            whole[i, : len(line)] = line
    return torch.from_numpy(whole)


def balance(num_tokens: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return the samples' indices for each rank: the longest first, each to the rank with the fewest tokens so far.

    The result follows from the arguments alone. A rank may get nothing; none gets more than the mean and the longest
    sample together.
    """
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for i in sorted(range(len(num_tokens)), key=lambda i: -num_tokens[i]):
        rank = loads.index(min(loads))
        dealt[rank].append(i)
        loads[rank] += num_tokens[i]
    return dealt


def balance_samples(
    samples: Sequence[Sample], chosen: Sequence[int], num_ranks: int, *, shares: bool
) -> list[list[int]]:
    """Assign the samples at `chosen` to ranks, a prompt's to one, unless the other ranks would wait for it."""
    if num_ranks == 1:
        return [list(chosen)]
    whole = _dealt(units(samples, chosen, max_tokens=None, shares=shares), num_ranks)
    if not shares:
        return whole
    single = _dealt(units(samples, chosen, max_tokens=None, shares=False), num_ranks)
    return min(whole, single, key=lambda dealt: max(_tokens(samples, mine) for mine in dealt))


def _dealt(parts: Sequence[Unit], num_ranks: int) -> list[list[int]]:
    dealt = balance([part.tokens for part in parts], num_ranks)
    return [[i for number in mine for i in parts[number].samples] for mine in dealt]


def _tokens(samples: Sequence[Sample], mine: Sequence[int]) -> int:
    """Return how many tokens a rank computes; shared ones count once."""
    return sum(part.tokens for part in units(samples, mine, max_tokens=None, shares=True))


def split_behind(found: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Split [B, T + 1] into the tokens, [B, T] with zeros in the padding, and what is behind the last one, [B]."""
    is_behind = torch.arange(found.shape[1]) == torch.tensor(lengths)[:, None]
    return found.masked_fill(is_behind, 0)[:, :-1], found[is_behind]
