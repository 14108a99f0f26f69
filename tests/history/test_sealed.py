"""Indexes over the history follow their store, whatever happens there, and are built in the background."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.history import HistoryDelta, HistoryStore
from rhymerl.history.sealed import SealedAnswers, SealedHistory
from tests.history.answers import answer, prompt


def tokens_of(sealed: SealedAnswers) -> list[list[int]]:
    """The answers of an index, in its order."""
    text, pieces = sealed.index.text, []
    for start in sealed.index.starts.tolist():
        end = start + int(np.flatnonzero(text[start:] < 0)[0])
        pieces.append(text[start:end].tolist())
    return pieces


def installed(history: SealedHistory, key: str, split: str = "train") -> SealedAnswers | None:
    history.install((split, key))
    return history.get((split, key), prompt(key).token_ids)


# -- weights -----------------------------------------------------------------------------------------------------


def test_weights_by_age_and_advantage():
    listed = [answer(epoch=1, advantage=2.0), answer(epoch=3, advantage=0.0), answer(epoch=4, advantage=-1.0)]
    sealed = SealedAnswers.of(prompt("a").token_ids, listed, recency=0.5, advantage_tilt=0.3)
    assert sealed.ages.tolist() == [3, 1, 0]
    assert sealed.weights.tolist() == pytest.approx([0.5**3 * np.exp(0.6), 0.5, np.exp(-0.3)])
    assert sealed.rewards.tolist() == [0.5] * 3


@pytest.mark.parametrize("advantage", [np.nan, np.inf, -np.inf])
def test_an_advantage_that_is_no_number_tilts_nothing(advantage):
    sealed = SealedAnswers.of(prompt("a").token_ids, [answer(advantage=advantage)], advantage_tilt=1.0)
    assert sealed.weights.tolist() == [1.0]


def test_a_steep_tilt_stays_finite():
    sealed = SealedAnswers.of(
        prompt("a").token_ids, [answer(advantage=3.0), answer(advantage=-3.0)], advantage_tilt=1e6
    )
    assert np.isfinite(sealed.weights).all()
    assert sealed.weights[0] > 1e40 * sealed.weights[1] > 0


def test_ages_count_from_the_newest_wherever_it_stands():
    sealed = SealedAnswers.of(prompt("a").token_ids, [answer(epoch=5), answer(epoch=2)], recency=0.5)
    assert sealed.ages.tolist() == [0, 3]
    assert sealed.weights.tolist() == [1.0, 0.125]


# -- following ---------------------------------------------------------------------------------------------------


@st.composite
def adds(draw):
    key, split = draw(st.sampled_from("aab")), draw(st.sampled_from(["train", "train", "validation"]))
    listed = [
        answer(
            epoch=draw(st.integers(0, 5)),  # late ones too
            sample=sample,
            token_ids=draw(st.lists(st.integers(0, 3), max_size=5)),
            policy_version=draw(st.integers(0, 2)),
        )
        for sample in range(draw(st.integers(1, 2)))
    ]
    return key, split, listed, draw(st.booleans())


@given(steps=st.lists(adds(), max_size=8), window=st.sampled_from([1, 2, 9]), max_prompts=st.sampled_from([None, 1]))
def test_what_is_indexed_is_what_the_store_holds(steps, window, max_prompts):
    """Replaced, late, outdated and evicted answers; deltas over several adds."""
    store, history = HistoryStore(window=3, max_prompts=max_prompts, log_size=2), SealedHistory(window=window)
    version = -1
    try:
        for key, split, listed, is_followed in [*steps, ("a", "train", [], True)]:
            store.add(prompt(key), listed, split)
            if not is_followed:
                continue
            delta = store.deltas(version)
            version = delta.version
            history.follow(delta)
            for name in [(split, key) for split in ("train", "validation") for key in "ab"]:
                known = store.answers(prompt(name[1]), name[0])
                newest = known[-1].epoch if known else 0
                expected = [each for each in known if each.epoch > newest - window]
                found = installed(history, name[1], name[0])
                if found is None:
                    assert expected == []
                    continue
                found.index.check_integrity()
                pairs = sorted(zip(tokens_of(found), found.ages.tolist(), strict=True))
                assert pairs == sorted((each.token_ids.tolist(), newest - each.epoch) for each in expected)
    finally:
        history.close()


def test_an_index_is_replaced_when_it_is_installed_and_not_before():
    store, history = HistoryStore(), SealedHistory(window=8)
    store.add(prompt("a"), [answer(epoch=0)])
    history.follow(store.snapshot())
    assert history.get(("train", "a"), prompt("a").token_ids) is None
    first = installed(history, "a")
    version = store.version
    store.add(prompt("a"), [answer(epoch=1, token_ids=[5, 5])])
    history.follow(store.deltas(version))
    assert history.get(("train", "a"), prompt("a").token_ids) is first
    assert tokens_of(installed(history, "a")) == [[1, 2, 3], [5, 5]]
    assert history.bytes == installed(history, "a").index.bytes
    history.close()


def test_settling_without_waiting_takes_what_is_there():
    store, history = HistoryStore(), SealedHistory(window=8)
    store.add(prompt("a"), [answer()])
    is_busy = threading.Event()
    history._submit(lambda: is_busy.wait(10))  # the thread builds one after another
    history.follow(store.snapshot())
    history.install(("train", "a"), wait=False)
    assert history.get(("train", "a"), prompt("a").token_ids) is None
    is_busy.set()
    assert tokens_of(installed(history, "a")) == [[1, 2, 3]]
    history.install(("train", "a"))  # again, and for what is unknown
    history.install(("train", "b"))
    history.close()


def test_a_key_that_belongs_to_another_prompt_has_no_index():
    store, history = HistoryStore(), SealedHistory(window=8)
    store.add(prompt("a", [7, 8]), [answer()])
    history.follow(store.snapshot())
    history.install(("train", "a"))
    assert history.get(("train", "a"), prompt("a", [7, 8]).token_ids) is not None
    assert history.get(("train", "a"), prompt("a", [7, 9]).token_ids) is None
    assert history.get(("validation", "a"), prompt("a", [7, 8]).token_ids) is None
    history.close()


def test_a_snapshot_starts_anew():
    old, new, history = HistoryStore(), HistoryStore(), SealedHistory(window=8)
    old.add(prompt("a"), [answer()])
    new.add(prompt("b"), [answer()])
    history.follow(old.snapshot())
    installed(history, "a")
    history.follow(new.snapshot())
    assert installed(history, "a") is None
    assert installed(history, "b") is not None
    history.close()


def test_it_goes_on_after_it_was_closed():
    store, history = HistoryStore(), SealedHistory(window=8)
    history.close()  # nothing to end yet
    store.add(prompt("a"), [answer()])
    history.follow(store.snapshot())
    history.close()
    assert tokens_of(installed(history, "a")) == [[1, 2, 3]]  # what was asked for has been built
    version = store.version
    store.add(prompt("a"), [answer(epoch=1)])
    history.follow(store.deltas(version))
    assert len(tokens_of(installed(history, "a"))) == 2
    history.close()


def test_an_error_of_the_thread_is_raised_where_the_index_is_wanted():
    store, history = HistoryStore(), SealedHistory(window=8)
    store.add(prompt("a"), [answer()])
    (change,) = store.snapshot()
    broken = replace(change, added=(replace(answer(), token_ids=np.zeros((2, 2), np.int32)),))
    history.follow(HistoryDelta(version=1, is_snapshot=True, changes=(broken,)))
    with pytest.raises(ValueError, match="dimension"):
        history.install(("train", "a"))
    history.close()
