"""The changes of a history as plain data, there and back, and what is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rhymerl.history import NO_VERSION, HistoryDelta, HistoryStore, PromptChange
from rhymerl.history.packing import pack_delta, unpack_delta
from rhymerl.history.sealed import SealedHistory
from tests.history.answers import answer, prompt


def store() -> HistoryStore:
    """Three prompts: one is forgotten since version 2, one is known anew, and one has lost its first epoch."""
    made = HistoryStore(max_tokens=20, window=2)
    made.add(prompt("a"), [answer(token_ids=[1] * 6)])
    made.add(prompt("b", [300_000]), [answer(token_ids=[2] * 6)], "validation")
    for epoch in range(3):
        made.add(prompt("ä"), [answer(epoch, number, [3, epoch], reward=float("nan")) for number in range(2)])
    made.add(prompt("c", []), [answer(finish_reason="length", token_ids=[5] * 10)])
    return made


def values(delta: HistoryDelta) -> list[Any]:
    """All that is in it."""
    changes = [
        (each.split, each.key, each.is_forgotten, each.first_epoch, each.prompt_token_ids.tolist(), each.added)
        for each in delta
    ]
    return [delta.version, delta.is_snapshot, changes]


@pytest.mark.parametrize("since", [NO_VERSION, 2, 5, 6])
def test_a_change_comes_back_as_it_went(since: int) -> None:
    delta = store().deltas(since)
    assert values(unpack_delta(pack_delta(delta))) == values(delta)


def test_the_store_has_changes_of_every_kind() -> None:
    kinds = {(each.is_forgotten, bool(each.added)) for each in store().deltas(2)}
    assert kinds == {(True, False), (False, True)}


def changed(name: str, value: Any) -> dict[str, Any]:
    """A change of the store, packed, but for one section."""
    return {**pack_delta(store().deltas(4)), name: bytearray(value)}


def numbers(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


NAMES = bytes(pack_delta(store().deltas(4))["names"])
HOSTILE = {
    "no changes": ("changes", b""),
    "half a number": ("changes", b"abc"),
    "too few": ("changes", numbers(6, 0)),
    "too many": ("changes", numbers(6, 0, *[0] * 40)),
    "a negative version": ("changes", numbers(-1, *[0] * 9)),
    "neither forgotten nor not": ("changes", numbers(6, 0, 0, 2, *[0] * 6)),
    "lengths whose sum overflows": ("lengths", numbers(2**63 - 1, 2**63 - 1, 16)),
    "answers whose sum overflows": ("num_answers", numbers(2**63 - 1, 2**63 - 1, 2, 3)),
    "a split that is none": ("names", NAMES.replace(b"train", b"rain", 1)),
    "names that nest": ("names", b"[" * 100_000),
    "a name that is a number": ("names", NAMES.replace(b'"a"', b"1")),
    "a negative token": ("tokens", np.full(14, -1, "<i4").tobytes()),
    "a reason that is none": ("finish_reasons", b"\7" * 3),
}


def test_what_is_made_hostile_has_four_changes() -> None:
    """What is hostile is so by one field alone: each has as many numbers as there are of these."""
    delta = unpack_delta(pack_delta(store().deltas(4)))
    assert [len(each.added) for each in delta] == [0, 0, 2, 1]
    assert sum(len(answer.token_ids) for each in delta for answer in each.added) == 14


@pytest.mark.parametrize(("name", "value"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_change_is_refused(name: str, value: bytes) -> None:
    with pytest.raises(ValueError, match="^its (column|list of prompts)"):
        unpack_delta(changed(name, value))


@pytest.mark.parametrize("missing", pack_delta(store().snapshot()))
def test_nothing_may_be_missing(missing: str) -> None:
    sections = pack_delta(store().snapshot())
    del sections[missing]
    with pytest.raises(ValueError, match="^its (column|list of prompts)"):
        unpack_delta(sections)


def test_a_change_that_leaves_no_answer_is_survived() -> None:
    """No store says so, but a client may: the pool over all prompts is made of what is left."""
    followed = SealedHistory(window=2, pools=True)
    followed.follow(HistoryDelta(version=1, is_snapshot=True, changes=(change("a", 0), change("b", 0))), builds=False)
    followed.follow(HistoryDelta(version=2, is_snapshot=False, changes=(change("a", 2**40),)), builds=False)
    pool = followed.pool("train")
    assert pool is not None
    assert pool.num_tokens == 3
    assert followed.get(("train", "a"), prompt("a").token_ids) is None


def change(key: str, first_epoch: int) -> PromptChange:
    """An answer of epoch 0."""
    return PromptChange(
        split="train",
        key=key,
        is_forgotten=False,
        first_epoch=first_epoch,
        prompt_token_ids=prompt(key).token_ids,
        added=(answer(),),
    )
