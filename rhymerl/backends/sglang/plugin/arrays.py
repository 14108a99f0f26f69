"""Draft trees as SGLang's arrays: n nodes a request, of which the first is its last token. R = requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rhymerl.compiled import compiled
from rhymerl.engine.ragged import IndexArray
from rhymerl.types import DraftBatch

if TYPE_CHECKING:
    from rhymerl.types import BoolArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeArrays:
    """The trees that SGLang verifies: parents come first, and a node without a parent, except node 0, is padding that nothing can reach."""

    token_ids: IndexArray  # [R, n]
    parents: IndexArray  # [R, n] -1 = none

    def flat(self) -> npt.NDArray[np.int64]:
        """Both in one array [R, 2 n], to send from one rank to the others."""
        return np.concatenate([self.token_ids, self.parents], axis=1)

    @classmethod
    def unflat(cls, flat: npt.NDArray[np.int64]) -> TreeArrays:
        """Build it from `flat`'s array."""
        n = flat.shape[1] // 2
        return cls(token_ids=flat[:, :n], parents=flat[:, n:])

    def mask(self) -> BoolArray:
        """[R, n, n] True where node j is i or one of its ancestors."""
        num_requests, n = self.parents.shape
        mask = np.zeros((num_requests, n, n), np.bool_)
        _show_ancestors(mask, self.parents)
        return mask


def lay_out(drafts: DraftBatch, roots: IndexArray, n: int) -> TreeArrays:
    """The drafts of R requests, at most n - 1 nodes each, below their last tokens `roots` [R].

    Siblings are distinct (the engine has checked the drafts). What is left of n is filled with orphans: children of nobody. Filling
    that were children of the root could be accepted, and twins would be sampled too often where a verifier accepts by
    chance.
    """
    token_ids = np.repeat(np.asarray(roots, np.int64)[:, None], n, axis=1)
    parents = np.full((len(drafts), n), -1, np.int64)
    index = np.arange(len(drafts.token_ids)) - drafts.starts[drafts.requests]
    assert len(index) == 0 or int(index.max()) < n - 1, "a draft has more nodes than the engine verifies"
    token_ids[drafts.requests, index + 1] = drafts.token_ids
    parents[drafts.requests, index + 1] = drafts.parents + 1
    return TreeArrays(token_ids=token_ids, parents=parents)


@compiled
def _show_ancestors(mask: BoolArray, parents: IndexArray) -> None:
    for r in range(mask.shape[0]):
        for node in range(mask.shape[1]):
            above = parents[r, node]
            if above >= 0:
                mask[r, node] = mask[r, above]
            mask[r, node, node] = True
