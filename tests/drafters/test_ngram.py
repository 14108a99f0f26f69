"""Prompt lookup from the index against prompt lookup by scanning the context."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.drafters import NGramDrafter
from rhymerl.drafts import DraftSource
from rhymerl.testing import make_prompt
from tests.drafters.requests import completion, context, request, requests

few = st.integers(0, 2)


def looked_up(tokens: Sequence[int], min_match: int, max_match: int) -> tuple[int, list[int]]:
    """The longest suffix that has come before, and all places behind it."""
    for length in range(min(max_match, len(tokens) - 1), min_match - 1, -1):
        suffix = tokens[len(tokens) - length :]
        indices = [k for k in range(length, len(tokens)) if tokens[k - length : k] == suffix]
        if indices:
            return length, indices
    return 0, []


@given(
    prompt=st.lists(few, max_size=40),
    pieces=st.lists(st.lists(few, max_size=6), min_size=1, max_size=5),
    min_match=st.integers(1, 4),
    more=st.sampled_from([0, 3, 28]),
    budget=st.integers(1, 12),
)
def test_what_followed_the_latest_place_of_the_longest_suffix(prompt, pieces, min_match, more, budget):
    drafter = NGramDrafter(min_match=min_match, max_match=min_match + more)
    (asking,) = requests(prompt, 1)
    drafter.start(asking)
    answer: list[int] = []
    for piece in pieces:
        answer += piece
        tokens = [*prompt, *answer]
        draft = drafter.propose(asking, context(asking, answer), budget)
        length, indices = looked_up(tokens, min_match, min_match + more)
        assert draft.match_length == length
        assert draft.parents.tolist() == list(range(-1, len(draft) - 1))
        continuations = [tokens[index : index + budget] for index in indices]
        if len(indices) <= 16:
            assert draft.token_ids.tolist() == (continuations[-1] if indices else [])
        else:  # only so many are looked at
            assert draft.token_ids.tolist() in continuations
    drafter.finish(completion(asking, answer))
    drafter.close()


def test_a_draft_goes_on_from_the_prompt_into_the_answer():
    drafter = NGramDrafter()
    (asking,) = requests([1, 2, 3], 1)
    drafter.start(asking)
    draft = drafter.propose(asking, context(asking, [4, 1, 2]), 8)
    assert draft.token_ids.tolist() == [3, 4, 1, 2]
    assert draft.sources.tolist() == [DraftSource.OWN] * 4
    assert drafter.propose(asking, context(asking, [4, 1, 2, 9]), 8).sources is None
    drafter.close()


def test_requests_know_nothing_of_one_another():
    drafter = NGramDrafter(min_match=1)
    prompt = make_prompt([1])
    one, two = request(prompt, 0), request(prompt, 1)
    drafter.start(one)
    drafter.start(two)
    batch = drafter.propose_batch([one, two], [context(one, [5, 6, 5]), context(two, [5])], [4, 4])
    assert [batch.draft(r).token_ids.tolist() for r in range(2)] == [[6, 5], []]
    drafter.finish(completion(one, [5, 6, 5]))
    drafter.start(one)  # anew
    assert len(drafter.propose(one, context(one, [5]), 4)) == 0
    drafter.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_match": 0}, "min_match=0: expected at least 1"),
        ({"max_match": 1}, "max_match=1: expected from min_match=2 to 32"),
        ({"max_match": 40}, "max_match=40: expected from min_match=2 to 32"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        NGramDrafter(**settings)
