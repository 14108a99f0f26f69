"""Draft trees as SGLang's arrays: n nodes a request, of which the first is its last token. R = requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymerl.compiled import compiled
from rhymerl.drafts import DraftBatch
from rhymerl.types import BoolArray, IndexArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeArrays:
    """Trees that SGLang verifies: parents come first; a node without one, except node 0, is unreachable padding."""

    token_ids: IndexArray  # [R, n]
    parents: IndexArray  # [R, n] -1 = none

    @property
    def n(self) -> int:
        """Nodes of each request."""
        return int(self.token_ids.shape[1])

    @staticmethod
    def message(trees: TreeArrays | None, num_requests: int, most: int) -> npt.NDArray[np.int64]:
        """Return n, tokens and parents (n = 0: None) in an array [1 + 2 R most], of one size for receiving ranks."""
        message = np.zeros(1 + 2 * num_requests * most, np.int64)
        if trees is not None:
            message[0] = trees.n
            size = trees.token_ids.size
            message[1 : 1 + size] = trees.token_ids.reshape(-1)
            message[1 + size : 1 + 2 * size] = trees.parents.reshape(-1)
        return message

    @classmethod
    def from_message(cls, message: npt.NDArray[np.int64], num_requests: int) -> TreeArrays | None:
        n = int(message[0])
        if n == 0:
            return None
        token_ids, parents = message[1 : 1 + 2 * num_requests * n].reshape(2, num_requests, n)
        return cls(token_ids=token_ids, parents=parents)

    def mask(self) -> BoolArray:
        """Return [R, n, n], True where node j is i or one of its ancestors."""
        num_requests, n = self.parents.shape
        mask = np.zeros((num_requests, n, n), np.bool_)
        _show_ancestors(mask, self.parents)
        return mask


def tree_arrays(drafts: DraftBatch, roots: IndexArray, n: int) -> TreeArrays:
    """Return the trees of R requests' drafts, at most n - 1 nodes each, below their last tokens `roots` [R].

    Siblings are distinct (the engine has checked the drafts). What is left of n is filled with orphans: children of
    nobody. Filling that were children of the root could be accepted, and twins would be sampled too often where a
    verifier accepts by chance.
    """
    token_ids = np.repeat(np.asarray(roots, np.int64)[:, None], n, axis=1)
    parents = np.full((len(drafts), n), -1, np.int64)
    index = np.arange(len(drafts.token_ids)) - drafts.starts[drafts.requests]
    assert len(index) == 0 or int(index.max()) < n - 1, "a draft has more nodes than the engine verifies"
    token_ids[drafts.requests, index + 1] = drafts.token_ids
    parents[drafts.requests, index + 1] = drafts.parents + 1
    return TreeArrays(token_ids=token_ids, parents=parents)


def full_mask(trees: Tensor, lengths: Tensor, n: int, *, num_tokens: int) -> Tensor:
    """Return the mask that SGLang's attention on a GPU reads, flat and bool.

    It has of each request in turn its n lines of `length + n`, whose end is its part of `trees` [R * n * n].
    `lengths` [R] are the lengths of the requests' contexts, which all nodes see; `num_tokens` is their sum, which the
    host knows already.
    """
    num_lines = len(lengths) * n
    ends = (lengths.long() + n).repeat_interleave(n, output_size=num_lines).cumsum(0)
    mask = torch.ones(n * num_tokens + n * num_lines, dtype=torch.bool, device=trees.device)
    indices = ends[:, None] + torch.arange(-n, 0, device=ends.device)
    mask[indices.view(-1)] = trees
    return mask


@compiled
def _show_ancestors(mask: BoolArray, parents: IndexArray) -> None:
    for r in range(mask.shape[0]):
        for node in range(mask.shape[1]):
            above = parents[r, node]
            if above >= 0:
                mask[r, node] = mask[r, above]
            mask[r, node, node] = True
