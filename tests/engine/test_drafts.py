"""Packed drafts against the drafts that they are made of."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.budgets import FixedBudget
from rhymerl.drafts import Draft, DraftBatch, closed, keep_nodes, within_turns
from rhymerl.engine.protocol import DraftingProtocol
from rhymerl.testing import OracleDrafter, make_requests


@st.composite
def drafts(draw) -> Draft:
    """A tree of tokens that differ, with or without what is optional."""
    count = draw(st.integers(0, 6))
    return Draft(
        token_ids=np.arange(count, dtype=np.int32) + draw(st.integers(0, 9)),
        parents=np.array([draw(st.integers(-1, node - 1)) for node in range(count)], np.int32),
        scores=draw(st.sampled_from([None, np.linspace(1, 0.5, count)])) if count else None,
        match_length=draw(st.integers(0, 5)),
        sources=draw(st.sampled_from([None, np.arange(count, dtype=np.int32)])) if count else None,
    )


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens from the context to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def assert_same(left: Draft, right: Draft) -> None:
    assert left.match_length == right.match_length
    for name in ("token_ids", "parents", "scores", "sources"):
        mine, theirs = getattr(left, name), getattr(right, name)
        assert (mine is None) == (theirs is None), name
        assert mine is None or (mine.dtype == theirs.dtype and mine.tolist() == theirs.tolist()), name


@given(st.lists(drafts(), max_size=5))
def test_what_is_packed_comes_out_again(singles):
    batch = DraftBatch.pack(singles)
    assert len(batch) == len(singles)
    assert batch.counts.tolist() == [len(draft) for draft in singles]
    assert batch.requests.tolist() == [r for r, draft in enumerate(singles) for _ in range(len(draft))]
    for r, draft in enumerate(singles):
        assert_same(batch.draft(r), draft)


@given(st.lists(drafts(), max_size=5), st.data())
def test_keeping_a_part_leaves_the_paths_as_they_were(singles, data):
    batch = DraftBatch.pack(singles)
    count = len(batch.token_ids)
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
    mask = closed(batch, wanted)
    part = keep_nodes(batch, wanted)
    for r, draft in enumerate(singles):
        mine = slice(batch.starts[r], batch.starts[r + 1])
        with_ancestors = []
        for parent, chosen in zip(draft.parents, wanted[mine], strict=True):
            with_ancestors.append(bool(chosen) and (parent < 0 or with_ancestors[parent]))
        assert mask[mine].tolist() == with_ancestors
        assert paths(part.draft(r)) == [path for path, stays in zip(paths(draft), with_ancestors, strict=True) if stays]
        assert part.match_length[r] == draft.match_length
        np.testing.assert_array_equal(part.scores[part.requests == r], batch.scores[mine][with_ancestors])


def test_plain_lists_pack_into_the_types_of_the_fields():
    batch = DraftBatch.pack([Draft(token_ids=[5, 7], parents=[-1, 0], scores=[1, 0.5], sources=[3, 3])])
    types = {name: getattr(batch, name).dtype.name for name in ("token_ids", "parents", "starts", "scores", "sources")}
    assert types == {
        "token_ids": "int32",
        "parents": "int32",
        "starts": "int64",
        "scores": "float64",
        "sources": "int8",
    }


def test_a_token_id_beyond_int32_stays_outside_every_vocabulary():
    batch = DraftBatch.pack([Draft(token_ids=[2**32 + 5, -(2**32) + 5], parents=[-1, -1])])
    assert batch.token_ids.tolist() == [2**31 - 1, -(2**31)]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"token_ids": [5, 6]}, "one length"),
        ({"token_ids": [[5]], "parents": [[-1]]}, "one length"),
        ({"token_ids": [[5], [6, 7]]}, "one length"),
        ({"token_ids": [5.5]}, "must be integers"),
        ({"scores": [0.5, 0.5]}, r"scores \(2,\) must be as long"),
        ({"sources": 3}, r"sources \(\) must be as long"),
    ],
)
def test_what_cannot_be_packed_is_left_empty_and_named(fields, problem):
    good = Draft(token_ids=[8], parents=[-1])
    bad = Draft(**{"token_ids": [5], "parents": [-1], **fields})
    batch = DraftBatch.pack([good, bad, good])
    assert batch.counts.tolist() == [1, 0, 1]
    assert batch.problems.keys() == {1}
    assert re.search(problem, batch.problems[1])


@given(st.lists(drafts(), min_size=1, max_size=5), st.sets(st.integers(0, 14), max_size=4))
def test_nothing_stands_behind_the_end_of_a_turn(singles, stops):
    requests = make_requests(len(singles), stop_token_ids=tuple(stops))
    part = within_turns(DraftBatch.pack(singles), requests)
    for r, single in enumerate(singles):
        wanted = [path for path in paths(single) if not stops.intersection(path[:-1])]
        assert paths(part.draft(r)) == wanted


@pytest.mark.parametrize(("may_go_on", "wanted"), [(True, [5, 6, 2]), (False, [5, 6, 2, 7, 8])])
def test_the_drafts_of_an_episode_end_with_its_turn(may_go_on, wanted):
    (request,) = make_requests(1, stop_token_ids=(2, 3))
    request = replace(request, may_go_on=may_go_on)
    protocol = DraftingProtocol(OracleDrafter({request.id: [5, 6, 2, 7, 8]}), FixedBudget(16), vocabulary=19)
    limits, room = np.array([8], np.int32), np.array([32], np.int32)
    drafts = protocol.propose([request], [request.prompt.token_ids], limits, room)
    assert drafts.token_ids.tolist() == wanted
