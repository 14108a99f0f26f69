"""What is left until a pass is launched, and what is found before and after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.testing import make_prompt
from tests.drafters.requests import completion, context, request

few = st.integers(0, 2)


def contents(drafter: HistoryTreeDrafter) -> list[tuple[list[int], list[int]]]:
    """Return text and positions of each prompt's live index; equal left contexts may stand in any order."""
    found = []
    for group in drafter._groups.values():
        index = group.index
        index.check_integrity()
        order, fill, sequence, _ = index.blocks
        blocks = [order[block, : fill[block]] for block in sequence[: index.num_blocks]]
        rows = zip(index.starts.tolist(), index.ends.tolist(), strict=True)
        text = [token for start, end in rows for token in index.text[start:end].tolist()]
        found.append((text, sorted(np.concatenate(blocks).tolist())))
    return found


@given(
    passes=st.lists(st.lists(st.lists(few, max_size=4), min_size=4, max_size=4), max_size=6),
    ends=st.lists(st.integers(0, 3), max_size=2, unique=True),
    launched=st.lists(st.booleans(), min_size=7, max_size=7),
)
def test_an_index_that_has_caught_up_is_one_that_never_was_behind(passes, ends, launched):
    """Two prompts, two requests each; some end before the last pass, and some passes are not launched."""
    twin, drafter = HistoryTreeDrafter(), HistoryTreeDrafter()
    running = [request(make_prompt([1, number]), sample) for number in range(2) for sample in range(2)]
    answers = [list[int]() for _ in running]
    for number, drawn in enumerate([*passes, [[1]] * 4]):
        for answer, tokens in zip(answers, drawn, strict=True):
            answer += tokens
        if number == len(passes):
            for r in sorted(ends, reverse=True):
                for each in (twin, drafter):
                    each.finish(completion(running[r], answers[r]))
                del running[r], answers[r]
        contexts = [context(each, answer) for each, answer in zip(running, answers, strict=True)]
        for each in (twin, drafter):
            each.propose_batch(running, contexts, [4] * len(running))
        if launched[number]:
            drafter.catch_up()
    drafter.catch_up()
    assert contents(drafter) == contents(twin)
    for each in (twin, drafter):
        each.close()


@pytest.mark.parametrize("is_launched", [False, True])
def test_new_tokens_are_found_at_once_only_where_no_launch_waits_for_it(drafters, is_launched):
    """After the second 5 comes the token after the first, which is as new in the second pass, but not in the third."""
    drafter, one = drafters(), request(make_prompt([1]))
    drafter.start(one)
    found = []
    for tokens in ([5], [5, 6, 7, 5], [5, 6, 7, 5, 6, 7, 5]):
        found.append(drafter.propose(one, context(one, tokens), 2).token_ids.tolist())
        if is_launched:
            drafter.catch_up()
    assert found[0] == []
    assert found[1] == ([] if is_launched else [6, 7])
    assert found[2] == [6, 7]


def test_text_that_is_not_sorted_in_is_read_behind_a_match(drafters):
    """1 | 5 6 is known, 7 8 are new: a sibling that has drawn 5 is told all three."""
    drafter, one, two = drafters(), request(make_prompt([1]), 0), request(make_prompt([1]), 1)
    for each in (one, two):
        drafter.start(each)
    drafter.propose_batch([one, two], [context(one, [5, 6]), context(two, [])], [4, 4])
    drafter.catch_up()
    batch = drafter.propose_batch([one, two], [context(one, [5, 6, 7, 8]), context(two, [5])], [4, 4])
    assert batch.draft(1).token_ids.tolist() == [6, 7, 8]


def test_an_engine_that_launches_no_more_waits_for_nothing(drafters):
    drafter, one = drafters(), request(make_prompt([1]))
    drafter.start(one)
    drafter.propose(one, context(one, [5]), 1)
    drafter.catch_up()
    found = [
        drafter.propose(one, context(one, tokens), 1).token_ids.tolist() for tokens in ([5, 6, 6], [5, 6, 6, 7, 7])
    ]
    assert found == [[], [7]]
