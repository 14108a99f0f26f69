"""The tokens that truncation left to sample from, over which log-probs are normalised. N = tokens, V = vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from rhymerl.types import IndexArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """A set of ids for each token, one after another; an empty one is the whole vocabulary."""

    token_ids: Tensor  # [ends[-1]]
    counts: Tensor  # [N]
    ends: IndexArray  # [N + 1] in the host's memory, which then knows shapes without waiting for a device

    @classmethod
    def of(cls, sets: Sequence[IntArray], device: torch.device | str) -> KeptTokens:
        counts = np.array([len(each) for each in sets], np.int64)
        ids = np.concatenate([np.empty(0, np.int32), *sets]).astype(np.int64)
        ends = np.concatenate([[0], counts.cumsum()])
        return cls(token_ids=torch.from_numpy(ids).to(device), counts=torch.from_numpy(counts).to(device), ends=ends)

    def only(self, logits: Tensor, part: slice) -> Tensor:
        """Return the logits of the tokens in `part`, [n, V], with -inf outside their sets."""
        first, last, counts = int(self.ends[part.start]), int(self.ends[part.stop]), self.counts[part]
        lines = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=last - first)
        is_out = (counts > 0)[:, None].repeat(1, logits.shape[-1])
        is_out[lines, self.token_ids[first:last]] = False
        return logits.masked_fill(is_out, float("-inf"))
