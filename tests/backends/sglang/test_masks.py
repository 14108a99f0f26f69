"""The mask of attention, against the same made line by line."""

from __future__ import annotations

import pytest
import torch

from rhymerl.backends.sglang.plugin.arrays import full_mask


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("lengths", [[5], [1, 7, 3], [4, 4, 4, 4], list(range(1, 40))])
def test_earlier_tokens_are_seen_by_all_and_nodes_as_the_trees_say(lengths, n):
    torch.manual_seed(len(lengths) * n)
    trees = torch.rand(len(lengths), n, n) < 0.5
    lines = [torch.cat([torch.ones(n, length).bool(), tree], 1) for length, tree in zip(lengths, trees, strict=True)]
    made = full_mask(trees.view(-1), torch.tensor(lengths, dtype=torch.int32), n, num_tokens=sum(lengths))
    assert made.dtype == torch.bool
    assert torch.equal(made, torch.cat([line.flatten() for line in lines]))
