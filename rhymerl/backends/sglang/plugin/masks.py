"""Attention masks of draft trees, as SGLang's attention on a GPU reads them. R = requests, n = nodes of each."""

from __future__ import annotations

import torch
from torch import Tensor


def full_mask(trees: Tensor, lengths: Tensor, n: int, *, num_tokens: int) -> Tensor:
    """Flat and bool: of each request in turn its n lines of `length + n`, whose end is its part of `trees` [R * n * n].

    `lengths` [R] are the lengths of the requests' contexts, which all nodes see; `num_tokens` is their sum, which the
    host knows already.
    """
    num_lines = len(lengths) * n
    ends = (lengths.long() + n).repeat_interleave(n, output_size=num_lines).cumsum(0)
    mask = torch.ones(n * num_tokens + n * num_lines, dtype=torch.bool, device=trees.device)
    indices = ends[:, None] + torch.arange(-n, 0, device=ends.device)
    mask[indices.view(-1)] = trees
    return mask
