"""Whose tokens stand in which row of a prompt's live index."""

from __future__ import annotations

import numpy as np
import pytest

from rhymerl.drafters.live import LiveGroup
from tests.drafters.requests import completion, context, requests, resumed


def tokens_of(group: LiveGroup, row: int) -> list[int]:
    return group.index.text[group.index.starts[row] : group.index.ends[row]].tolist()


def test_rows_grow_with_their_contexts():
    one, two = requests([1, 2], 2)
    group = LiveGroup(one.prompt.token_ids)
    assert group.extend([one.id], [context(one, [5])]).tolist() == [1]
    rows = group.extend([two.id, one.id], [context(two, [7]), context(one, [5, 6])])
    assert rows.tolist() == [2, 1]
    group.extend([one.id], [context(one, [5, 6])])  # nothing new
    group.extend([one.id], [context(one, [5, 6, 3])])
    group.index.check_integrity()
    assert [tokens_of(group, row) for row in range(3)] == [[1, 2], [5, 6, 3], [7]]


def test_the_last_tokens_come_with_the_completion_once_another_asks():
    one, two = requests([1, 2], 2)
    group = LiveGroup(one.prompt.token_ids)
    group.extend([one.id, two.id], [context(one, [5]), context(two, [])])
    ended = completion(one, [5, 6, 7])
    ended.token_ids.flags.writeable = False
    group.finish(ended)
    assert group.running == {two.id: 2}
    assert tokens_of(group, 1) == [5], "nobody has asked"
    group.extend([two.id], [context(two, [])])
    assert tokens_of(group, 1) == [5, 6, 7]


def test_an_answer_that_never_asked_serves_the_others():
    one, two = requests([1, 2], 2)
    group = LiveGroup(one.prompt.token_ids)
    group.finish(completion(one, [5, 6, 7]))
    assert group.extend([two.id], [context(two, [])]).tolist() == [2]
    assert tokens_of(group, 1) == [5, 6, 7]


@pytest.mark.parametrize(
    ("left_with", "comes_with", "row"),
    [
        ([], [], 1),
        ([5, 6], [5, 6], 1),
        ([5, 6], [5, 6, 7], 1),
        ([5, 6], [5], 2),
        ([5, 6], [], 2),
        ([5, 6], [5, 7, 6], 2),
    ],
)
def test_a_request_goes_on_in_its_row_unless_it_is_answered_anew(left_with, comes_with, row):
    (one,) = requests([1, 2], 1)
    group = LiveGroup(one.prompt.token_ids)
    group.extend([one.id], [context(one, [])])
    group.finish(completion(one, left_with, "withdrawn"))
    again = resumed(one, comes_with)
    assert group.extend([again.id], [context(again, [*comes_with, 9])]).tolist() == [row]
    assert tokens_of(group, row) == [*comes_with, 9]
    assert tokens_of(group, 1)[:2] == (left_with or [9])
    group.index.check_integrity()


def test_a_row_is_handed_out_once():
    (one,) = requests([1, 2], 1)
    group = LiveGroup(one.prompt.token_ids)
    for round_number in range(3):  # withdrawn and answered anew, again and again
        group.extend([one.id], [context(one, [round_number])])
        group.finish(completion(one, [round_number], "withdrawn"))
    assert [tokens_of(group, row) for row in (1, 2, 3)] == [[0], [1], [2]]
    assert len(np.unique(group.index.starts)) == 4
