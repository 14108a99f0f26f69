"""Test-only stand-in for `sgl_kernel.speculative`."""

from __future__ import annotations

import torch
from torch import Tensor


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Read positions and links off the ancestor masks: the last four tensors are mutable, -1 means none.

    `tree_mask` [bs * n * n] is true where the column is the row's node or an ancestor of it; parents come before their
    children. A node without an ancestor is nobody's child and has no sibling.
    """
    n = draft_token_num
    ancestors = tree_mask.view(batch_size, n, n).bool().tril(-1)
    order = torch.arange(n)
    parents = torch.where(ancestors, order, -1).amax(-1)  # [bs, n]
    later = order[:, None] > order  # [k, i]: k comes after i
    children = parents[:, :, None] == order  # [bs, k, i]: i is the parent of k
    siblings = (parents[:, :, None] == parents[:, None, :]) & (parents >= 0)[:, None, :] & later
    positions.view(batch_size, n).copy_(ancestors.sum(-1) + verified_seq_len[:, None])
    retrive_index.copy_(torch.arange(batch_size * n).view(batch_size, n))
    retrive_next_token.copy_(_first(children))
    retrive_next_sibling.copy_(_first(siblings))


def _first(chosen: Tensor) -> Tensor:
    """The smallest k with chosen[:, k, i], or -1."""
    return torch.where(chosen.any(1), chosen.int().argmax(1), -1)
