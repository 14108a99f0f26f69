"""Top-k, top-p and min-p: what may be sampled at all. n = draws, V = vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

AT_ONCE = 2**24  # logits; in torch each of them needs some 40 bytes


@dataclass(frozen=True, slots=True)
class Truncation:
    """What may be sampled at each draw, all [n]: the rules are off at top-k 0, top-p 1 and min-p 0."""

    temperatures: Tensor  # above 0; those that top-p and min-p see
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def part(self, which: slice) -> Truncation:
        """Return the truncation of some draws."""
        return Truncation(
            temperatures=self.temperatures[which],
            top_k=self.top_k[which],
            top_p=self.top_p[which],
            min_p=self.min_p[which],
        )

    def apply(self, logits: Tensor) -> Tensor:
        """Return a copy of logits [n, V] as `truncate` makes it."""
        top_p, min_p = self.top_p.to(logits), self.min_p.to(logits)
        return truncate(logits, self.temperatures.to(logits), self.top_k, top_p, min_p)

    def ahead(self, logits: Tensor, which: Tensor) -> tuple[Tensor, Truncation]:
        """Return logits [n, V] that are truncated at the draws in `which`, [n], and the truncation that is left to do.

        What a draw then sees is what is kept of it: no rule is applied twice.
        """
        rows = max(AT_ONCE // logits.shape[-1], 1)
        parts = [slice(start, start + rows) for start in range(0, len(logits), rows)]
        left = torch.cat(
            [torch.where(which[part, None], self.part(part).apply(logits[part]), logits[part]) for part in parts]
        )
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return left, replace(
            self, **{name: getattr(self, name).masked_fill(which, value) for name, value in off.items()}
        )


def truncate(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return a copy of logits [n, V] with -inf where temperature, top-k, top-p and min-p (each [n]) rule a token out.

    Each rule sees the renormalised distribution that the one before it left; the most likely token always stays.
    """
    ordered, order = (logits / temperature[:, None]).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    keep = (top_k[:, None] == 0) | (rank < top_k[:, None])
    probabilities = ordered.masked_fill(~keep, float("-inf")).softmax(-1)
    # A sum of many rounded numbers reaches 1 before its end: with top-p 1 nothing may fall behind it.
    keep &= (probabilities.cumsum(-1) - probabilities < top_p[:, None]) | (top_p[:, None] >= 1)
    keep &= probabilities >= min_p[:, None] * probabilities[:, :1]
    keep[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter_(-1, order, keep), float("-inf"))
