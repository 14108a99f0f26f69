"""The memory of the history drafter, and the settings it refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.history import HistoryStore
from rhymerl.testing import make_prompt
from rhymerl.types import RolloutRequest
from tests.drafters.requests import completion, context, request, requests
from tests.history.answers import answer


def answered(drafter: HistoryTreeDrafter, each: RolloutRequest, tokens: Sequence[int]) -> None:
    drafter.start(each)
    drafter.propose(each, context(each, tokens), 4)
    drafter.finish(completion(each, tokens))


@pytest.mark.parametrize("siblings", [True, False])
def test_running_answers_are_forgotten_when_they_are_history(drafters, siblings):
    drafter = drafters(siblings=siblings)
    empty = drafter.bytes
    first, second = requests([1, 2, 3], 2)
    answered(drafter, first, [4, 5])
    drafter.propose(second, context(second, []), 4)
    kept = drafter.bytes
    assert kept > empty
    drafter.follow(HistoryStore().deltas(0))
    assert (drafter.bytes == kept) == siblings  # the group has one that is running
    drafter.finish(completion(second, [4]))
    drafter.follow(HistoryStore().deltas(0))
    assert drafter.bytes == empty


def test_idle_prompts_beyond_a_number_are_forgotten(drafters):
    drafter = drafters()
    empty = drafter.bytes
    listed = [request(make_prompt([number, 2, 3])) for number in range(300)]
    answered(drafter, listed[0], [7, 8])
    one = drafter.bytes - empty
    for each in listed[1:]:
        answered(drafter, each, [7, 8])
    assert drafter.bytes - empty == 256 * one
    again = request(listed[-1].prompt, 1)
    drafter.start(again)  # the newest are still known
    assert drafter.propose(again, context(again, []), 4).token_ids.tolist() == [7, 8]
    drafter.finish(completion(again, [7]))


def test_memory_is_bounded_over_many_steps():
    """A window of 3 epochs of like size holds no more after 12 of them than after 4."""
    drafter, store = HistoryTreeDrafter(window=3, deterministic=True), HistoryStore(window=3, max_prompts=6)
    rng, sizes = np.random.default_rng(0), []
    for epoch in range(12):
        version = store.version
        for number in range(8):  # two of them are evicted each time
            prompt = make_prompt([number])
            for sample in range(2):
                tokens = rng.integers(0, 9, 40).tolist()
                answered(drafter, request(prompt, sample, name=f"{epoch}/{number}/{sample}"), tokens)
                store.add(prompt, [answer(epoch=epoch, sample=sample, token_ids=tokens)])
        drafter.follow(store.deltas(version))
        for number in range(8):
            drafter._history.install(("train", make_prompt([number]).key))
        drafter._history.pool("train", wait=True)
        sizes.append(drafter.bytes)
    assert max(sizes[4:]) <= max(sizes[:4])
    assert drafter._key_of == {}
    drafter.close()


def test_it_goes_on_after_it_was_closed(drafters):
    drafter = drafters([answer(token_ids=[5])])
    (one,) = requests([1], 1)
    drafter.start(one)
    drafter.close()  # with its engine, requests and all
    drafter.start(one)
    assert drafter.propose(one, context(one, []), 4).token_ids.tolist() == [5]
    drafter.finish(completion(one, [5]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": -1}, "window=-1: expected at least 0"),
        ({"min_match": 0}, "min_match=0: expected at least 1"),
        ({"max_matches": 0}, "max_matches=0: expected at least 1"),
        ({"max_branches": 0}, "max_branches=0: expected at least 1"),
        ({"max_match": 33}, "max_match=33: expected from min_match=1 to 32"),
        ({"min_match": 5, "max_match": 4}, "max_match=4: expected from min_match=5 to 32"),
        ({"priority": "luck"}, "priority='luck': expected probability or reward"),
        ({"length_weight": 0.5}, "length_weight=0.5: expected 1 or more; .inf counts the longest suffixes alone"),
        ({"length_weight": np.nan}, "length_weight=nan: expected 1 or more; .inf counts the longest suffixes alone"),
        ({"recency": 0.0}, "recency=0.0: expected above 0, at most 1"),
        ({"advantage_tilt": np.nan}, "advantage_tilt=nan: expected a finite number"),
        ({"escape": -0.1}, "escape=-0.1: expected 0 or more, and finite"),
        ({"escape": np.inf}, "escape=inf: expected 0 or more, and finite"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        HistoryTreeDrafter(**settings)
