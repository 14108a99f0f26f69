"""Draft trees as SGLang's arrays, against the embedded engine's own tree code."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.backends.sglang.plugin.arrays import TreeArrays, tree_arrays
from rhymerl.drafts import Draft, DraftBatch, depths, no_drafts, problems_of
from rhymerl.engine.verify import verify
from tests.backends.sglang.trees import VOCABULARY, drafts, links_of, path_of

N = 7


def batches(n: int = N):
    return st.lists(drafts(n - 1), min_size=1, max_size=4).map(DraftBatch.pack)


def laid_out(batch: DraftBatch, n: int = N) -> TreeArrays:
    return tree_arrays(batch, np.arange(100, 100 + len(batch)), n)


@given(batches())
def test_nodes_follow_the_root_and_see_themselves_and_their_ancestors(batch):
    arrays = laid_out(batch)
    mask = arrays.mask()
    assert arrays.token_ids[:, 0].tolist() == list(range(100, 100 + len(batch)))
    index = np.arange(len(batch.token_ids)) - batch.starts[batch.requests] + 1
    assert arrays.token_ids[batch.requests, index].tolist() == batch.token_ids.tolist()
    assert (mask.sum(-1)[batch.requests, index] - 1).tolist() == depths(batch).tolist()
    for r, node, above in zip(batch.requests, index, batch.parents, strict=True):
        assert mask[r, node, 1:].tolist() == (mask[r, above + 1, 1:] | np.eye(N, dtype=int)[node, 1:]).tolist()


@given(batches())
def test_orphans_are_reachable_from_nowhere(batch):
    mask = laid_out(batch).mask()
    for r, count in enumerate(batch.counts.tolist()):
        orphans = range(1 + count, N)
        children, siblings = links_of(mask[r])
        assert not {*children, *siblings} & {*orphans}
        for node in orphans:
            assert mask[r, node].tolist() == mask[r, :, node].tolist() == np.eye(N, dtype=int)[node].tolist()
            assert children[node] == siblings[node] == -1


@given(batches(), st.data())
def test_greedy_verification_takes_the_path_that_our_own_takes(batch, data):
    num_requests = len(batch)
    tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=N, max_size=N)
    predictions = np.array([data.draw(tokens) for _ in range(num_requests)], np.int32)
    arrays, mask = laid_out(batch), laid_out(batch).mask()
    theirs = [
        predictions[r, path_of(mask[r], arrays.token_ids[r], predictions[r])].tolist() for r in range(num_requests)
    ]
    assert theirs == [each.tolist() for each in emitted(batch, predictions)]


def emitted(batch: DraftBatch, predictions: np.ndarray) -> list[np.ndarray]:
    """Return what the embedded engine emits when it draws `predictions` [R, n] at the roots and their nodes."""
    counts = 1 + batch.counts  # logits of each request
    row, start = np.repeat(np.arange(len(batch)), counts), np.cumsum(counts) - counts
    rows = SimpleNamespace(
        length=np.ones(len(batch), np.int64),
        prompt_length=np.ones(len(batch), np.int64),
        limit=np.full(len(batch), 99),
        stop_ids=np.full((len(batch), 1), -1, np.int32),
    )
    layout = SimpleNamespace(
        emitting=np.arange(len(batch)),
        drafts=batch,
        logit_row=row,
        logit_start=start,
        logit_level=np.zeros(len(row), np.int64),
    )
    sampled = predictions[row, np.arange(len(row)) - start[row]]
    sampler = SimpleNamespace(draws_ahead=True, draw=lambda indices, row, positions: sampled[indices])
    steps = verify(layout, rows, sampler)
    return np.split(steps.token, np.cumsum(steps.num_emitted)[:-1])


@given(batches())
def test_a_message_and_back(batch):
    """Its size says nothing of the trees: who receives it knows no more than the requests."""
    arrays = laid_out(batch)
    message = TreeArrays.message(arrays, len(batch), arrays.n + 3)
    again = TreeArrays.from_message(message, len(batch))
    assert message.dtype == np.int64
    assert again.token_ids.tolist() == arrays.token_ids.tolist()
    assert again.parents.tolist() == arrays.parents.tolist()
    nothing = TreeArrays.message(None, len(batch), arrays.n + 3)
    assert nothing.shape == message.shape
    assert TreeArrays.from_message(nothing, len(batch)) is None


def test_without_drafts_there_is_only_the_last_token():
    arrays = tree_arrays(no_drafts(3), np.array([5, 6, 7]), 1)
    assert arrays.token_ids.tolist() == [[5], [6], [7]]
    assert arrays.mask().tolist() == [[[1]]] * 3


def test_nobody_in_the_batch():
    assert tree_arrays(no_drafts(0), np.empty(0, np.int64), N).mask().shape == (0, N, N)


@pytest.mark.parametrize(
    "parents",
    [list(range(-1, N - 2)), [-1] * (N - 1), [-1, -1, 0, 1, 2, 2]],
    ids=["chain", "star", "tree"],
)
def test_a_full_tree_has_no_orphans(parents):
    draft = Draft(token_ids=np.arange(N - 1, dtype=np.int32), parents=np.array(parents, np.int32))
    batch = DraftBatch.pack([draft])
    assert not problems_of(batch, limits=np.array([N - 1]), vocabulary=VOCABULARY)
    arrays = laid_out(batch)
    assert arrays.parents.tolist() == [[-1, *(parent + 1 for parent in parents)]]
    assert arrays.mask()[0, :, 0].tolist() == [1] * N


def test_more_nodes_than_the_engine_verifies_are_our_own_bug():
    draft = Draft(token_ids=np.arange(N, dtype=np.int32), parents=np.arange(-1, N - 1, dtype=np.int32))
    with pytest.raises(AssertionError, match="more nodes than the engine verifies"):
        laid_out(DraftBatch.pack([draft]))
