from __future__ import annotations

import pytest

from rhymerl.history import HistoryStore, pool
from rhymerl.history.pool import pooled
from rhymerl.history.sealed import SealedHistory
from tests.history.answers import answer, prompt


def group(epoch: int, *lengths: int):
    return [answer(epoch=epoch, sample=sample, token_ids=range(length)) for sample, length in enumerate(lengths)]


def sizes(found):
    return [(key, answers[0].epoch, [len(each) for each in answers]) for key, answers in found]


def test_the_newest_epoch_of_each_prompt_comes_first():
    prompts = [("b", group(1, 3, 4)), ("a", [*group(0, 5), *group(1, 6)]), ("c", group(0, 2))]
    assert sizes(pooled(prompts)) == [("b", 1, [3, 4]), ("a", 1, [6]), ("c", 0, [2]), ("a", 0, [5])]


@pytest.mark.parametrize(("room", "expected"), [(1, ["b"]), (7, ["b"]), (8, ["b", "a"]), (14, ["b", "a", "c"])])
def test_it_ends_where_it_is_full_and_asks_for_no_more(monkeypatch, room, expected):
    monkeypatch.setattr(pool, "POOL_TOKENS", room)
    asked = []

    def prompts():
        for key, answers in [("b", group(1, 3, 4)), ("a", group(0, 6)), ("c", group(0, 2)), ("d", group(0, 9))]:
            asked.append(key)
            yield key, answers

    assert [key for key, _ in pooled(prompts())] == expected
    assert asked == expected


def test_nothing_is_in_the_pool_of_nothing():
    assert pooled([]) == []


def texts(history, split="train"):
    found = history.pool(split)
    if found is None:
        return []
    text, starts = found.text.tolist(), found.starts.tolist()
    return [text[start : text.index(-1, start)] for start in starts]


def test_followers_have_the_pool_of_the_store_whatever_they_were_told():
    """A reader of deltas and one of a snapshot, as after a resume; and validation by itself."""
    store = HistoryStore(window=2, max_prompts=3)
    told = SealedHistory(window=8, pools=True)
    version = -1
    for epoch in range(3):
        for key in "abcd" if epoch < 2 else "db":
            store.add(prompt(key), [answer(epoch=epoch, token_ids=[ord(key), epoch])])
            store.add(prompt(key), [answer(epoch=epoch, token_ids=[1])], "validation")
            delta = store.deltas(version)
            version = delta.version
            told.follow(delta)
            fresh = SealedHistory(window=8, pools=True)
            fresh.follow(store.snapshot())
            for split in ("train", "validation"):
                kept = [list(each.token_ids) for listed in store.newest(split) for each in listed.answers]
                assert texts(told, split) == texts(fresh, split) == kept
            fresh.close()
    told.close()


def test_without_pools_there_is_none():
    history = SealedHistory(window=8)
    store = HistoryStore()
    store.add(prompt("a"), [answer()])
    history.follow(store.snapshot())
    assert history.pool("train") is None
    history.close()
