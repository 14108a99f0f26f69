"""Tensors of which not every token counts."""

from __future__ import annotations

from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the tokens that count; what stands in the others may be anything, NaN included."""
    return values.masked_fill(~mask, 0).sum()
