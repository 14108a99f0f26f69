from __future__ import annotations

import gc
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhymerl.errors import DataError, RunError
from rhymerl.history import HistoryStore
from tests.bytecodes import bytecodes
from tests.history.answers import answer, prompt

A, B, C = prompt("a"), prompt("b"), prompt("c")


def keys(store: HistoryStore) -> list[str]:
    """Prompts that are known, longest unused first."""
    return [change.key for change in store.snapshot()]


@pytest.mark.parametrize("name", ["window", "max_tokens", "max_prompts", "log_size"])
@pytest.mark.parametrize("value", [0, -3])
def test_a_setting_out_of_range_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name}={value}: expected at least 1$"):
        HistoryStore(**{name: value})


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^spill='.*file': "):
        HistoryStore(spill=tmp_path / "file")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epoch": -1}, "epoch=-1: expected 0 or more"),
        ({"sample": -1}, "sample=-1: expected 0 or more"),
        ({"finish_reason": "withdrawn"}, "finish_reason='withdrawn': expected one of stop, length"),
        ({"token_ids": [-1]}, "token_ids: expected a vector"),
        ({"token_ids": [[1]]}, "token_ids: expected a vector"),
    ],
)
def test_a_broken_answer_changes_nothing(changed: dict[str, Any], message: str) -> None:
    store = HistoryStore()
    with pytest.raises(ValueError, match=message):
        store.add(A, [answer(), answer(**changed)])
    assert (store.version, store.num_answers) == (0, 0)
    with pytest.raises(ValueError, match="split='test': expected one of train, validation"):
        store.add(A, [answer()], "test")  # type: ignore[arg-type]


def test_an_answer_is_copied_and_closed() -> None:
    store, given = HistoryStore(), answer(token_ids=[1, 2])
    store.add(A, [given])
    given.token_ids[0] = 9
    (known,) = store.answers(A)
    assert known.token_ids.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        known.token_ids[0] = 9


def test_answers_are_equal_when_all_fields_are() -> None:
    assert answer(reward=float("nan")) == answer(reward=np.float64("nan"))
    changes: list[dict[str, Any]] = [{"reward": 1}, {"token_ids": [1, 2]}, {"policy_version": 1}, {"epoch": 1}]
    assert all(answer() != answer(**changed) for changed in changes)


def test_the_longest_unused_prompt_goes_whole_and_reading_is_no_use() -> None:
    store = HistoryStore(max_prompts=2)
    for each in (A, B, A):
        store.add(each, [answer(sample=store.version)])
    store.answers(B)
    store.add(C, [answer()])
    assert keys(store) == ["a", "c"]
    assert (store.num_evicted, store.num_answers, store.answers(B)) == (1, 3, ())


def test_an_add_without_news_is_a_use_that_readers_do_not_see() -> None:
    store = HistoryStore(max_prompts=2)
    store.add(A, [answer()])
    store.add(B, [answer()])
    version = store.version
    store.add(A, [answer()])
    assert store.deltas(version).changes == ()
    store.add(C, [answer()])
    assert keys(store) == ["a", "c"]


def test_a_prompt_above_the_cap_loses_old_epochs_before_it_takes_others_with_it() -> None:
    store = HistoryStore(max_tokens=8)
    store.add(B, [answer(token_ids=[1])])
    for epoch in range(3):
        store.add(A, [answer(epoch=epoch)])
    assert [each.epoch for each in store.answers(A)] == [1, 2]
    store.add(A, [answer(epoch=3, token_ids=range(9))])
    assert keys(store) == ["b"]


@pytest.mark.parametrize("cap", [{"max_prompts": 2}, {"max_tokens": 8}], ids=str)
def test_answers_of_evaluations_push_no_others_out_and_are_the_first_to_go(cap: dict[str, int]) -> None:
    with_evaluations, without = HistoryStore(**cap), HistoryStore(**cap)
    for epoch, each in enumerate((A, B, A, C)):
        for store in (with_evaluations, without):
            store.add(each, [answer(epoch=epoch)])
        for evaluated in (A, C):
            with_evaluations.add(evaluated, [answer(epoch=epoch)], "validation")
    known = [
        [(each.key, each.added) for each in store.snapshot() if each.split == "train"]
        for store in (with_evaluations, without)
    ]
    assert known[0] == known[1] != []
    roomy = HistoryStore(**cap)
    roomy.add(A, [answer()], "validation")
    roomy.add(A, [answer()])
    assert roomy.num_prompts == 2, "there is room for both"


def test_another_prompt_with_the_same_key_is_never_mixed_in() -> None:
    store = HistoryStore()
    impostor = prompt("a", [7, 9])
    store.add(A, [answer()])
    store.add(impostor, [answer(sample=1)])
    assert (len(store.answers(A)), store.answers(impostor), store.num_collisions) == (1, (), 2)


def test_a_replaced_answer_is_learned_anew_with_its_prompt() -> None:
    store = HistoryStore()
    store.add(A, [answer(), answer(sample=1)])
    store.add(A, [answer(policy_version=1)])
    (change,) = store.deltas(1)
    assert change.is_forgotten
    assert [each.policy_version for each in change.added] == [1, 0]


def test_readers_get_what_they_lack_and_no_more() -> None:
    store = HistoryStore(window=2, max_prompts=2)
    for epoch in range(3):
        store.add(A, [answer(epoch=epoch)])
    store.add(B, [answer()])
    changed, added = store.deltas(2)
    assert (changed.key, changed.first_epoch, [each.epoch for each in changed.added]) == ("a", 1, [2])
    assert (added.key, added.first_epoch, len(added.added)) == ("b", 0, 1)
    store.add(C, [answer()])
    forgotten, _ = store.deltas(4)
    assert (forgotten.key, forgotten.is_forgotten, forgotten.added) == ("a", True, ())
    assert store.deltas(5).changes == ()


@pytest.mark.parametrize("since", [-1, 0, 1, 99])
def test_a_reader_that_cannot_be_told_gets_a_snapshot(since: int) -> None:
    store = HistoryStore(max_prompts=1, log_size=1)
    for each in (A, B, C):
        store.add(each, [answer()])
    assert not store.deltas(2).is_snapshot
    delta = store.deltas(since)
    assert (delta.is_snapshot, delta.version, [change.key for change in delta]) == (True, 3, ["c"])


def test_a_loaded_state_is_another_history_for_every_reader() -> None:
    store = HistoryStore()
    state = store.state_dict()
    store.add(A, [answer()])
    store.load_state_dict(state)
    assert [store.deltas(since).is_snapshot for since in range(3)] == [True, True, False]


def test_limits_apply_to_what_is_loaded_and_merged() -> None:
    large, small = HistoryStore(), HistoryStore(window=1, max_prompts=1)
    for each in (A, B):
        large.add(each, [answer(epoch=0), answer(epoch=1)])
    for take in (lambda: small.load_state_dict(large.state_dict()), lambda: small.merge(large)):
        take()
        assert keys(small) == ["b"]
        assert [each.epoch for each in small.answers(B)] == [1]
        small.check_integrity()


def test_merging_keeps_an_answer_once_and_prefers_the_newer_policy() -> None:
    left, right = HistoryStore(), HistoryStore()
    left.add(A, [answer(sample=0), answer(sample=1, policy_version=3), answer(sample=2), answer(sample=3, reward=1)])
    right.add(A, [answer(sample=0), answer(sample=1), answer(sample=2, policy_version=3), answer(sample=3, reward=2)])
    left.merge(right)
    assert [each.policy_version for each in left.answers(A)] == [0, 3, 3, 0]
    assert left.answers(A)[3].reward == 1


def test_merging_counts_the_limits_at_the_end_only() -> None:
    left, right = HistoryStore(max_prompts=2), HistoryStore()
    left.add(A, [answer()])
    for each in (B, C, A):
        right.add(each, [answer(epoch=1)])
    left.merge(right)
    assert keys(left) == ["c", "a"]
    assert len(left.answers(A)) == 2


def large_store(num_prompts: int = 1000) -> HistoryStore:
    store, random = HistoryStore(), np.random.default_rng(0)
    for number in range(num_prompts):
        group = [answer(sample=sample, token_ids=random.integers(0, 50_000, 125)) for sample in range(8)]
        store.add(prompt(str(number), random.integers(0, 50_000, 20)), group)
    return store


def test_a_million_tokens_go_through_a_checkpoint(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    store, again = large_store(), HistoryStore()
    torch.save(store.state_dict(), tmp_path / "state.ckpt")
    again.load_state_dict(torch.load(tmp_path / "state.ckpt", weights_only=True))
    assert (again.num_tokens, again.state_dict()) == (1_000_000, store.state_dict())


def test_a_checkpoint_has_few_objects_and_takes_little_work_an_answer() -> None:
    store, states = large_store(100), list[dict[str, Any]]()
    assert bytecodes(lambda: states.append(store.state_dict())) < 200 * store.num_answers
    assert bytecodes(lambda: HistoryStore().load_state_dict(states[0])) < 1200 * store.num_answers
    sections = states[0]["sections"]
    assert len(sections) < 20
    assert {type(section) for section in sections.values()} <= {bytes, bytearray}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"format": 2}, "its format is 2, expected 1"),
        ({"sections": {}}, "its list of prompts cannot be read"),
        ({"sections": {"tokens": b"abc"}}, "its column 'tokens' is missing or broken"),
        ({"sections": {"tokens": b"abcd"}}, "its column 'tokens' has 1 entries instead of 3"),
        ({"sections": {"finish_reasons": b"\7"}}, "unknown reason"),
        ({"sections": {"epochs": np.array([-1])}}, "its column 'epochs' has a negative number"),
        ({"sections": {"names": b'[["train", "a"], ["train", "a"]]'}}, "a prompt twice"),
        ({"sections": {"names": b'[["test", "a"]]'}}, "an unknown split"),
        ({"sections": {"names": b"[7]"}}, "its list of prompts cannot be read"),
    ],
)
def test_a_broken_state_changes_nothing(broken: dict[str, Any], message: str) -> None:
    store = HistoryStore()
    store.add(A, [answer()])
    state = store.state_dict()
    sections = {**state["sections"], **broken["sections"]} if broken.get("sections") else broken.get("sections")
    with pytest.raises(DataError, match=f"^history in the checkpoint: .*{message}"):
        store.load_state_dict({**state, **broken, **({"sections": sections} if sections else {})})
    assert (store.version, len(store.answers(A))) == (1, 1)


# -- scratch files -------------------------------------------------------------------------------------------------


def maps_of(directory: Path) -> list[str]:
    gc.collect()
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line]


def test_a_spilled_store_holds_the_same_and_leaves_no_file(tmp_path: Path) -> None:
    spilled, plain = HistoryStore(spill=tmp_path), HistoryStore()
    tokens = np.arange(200_000)  # beyond the first map
    for store in (spilled, plain):
        store.add(A, [answer(sample=sample, token_ids=tokens + sample) for sample in range(3)])
    assert spilled.state_dict() == plain.state_dict()
    assert spilled.bytes == plain.bytes == 4 * (600_000 + 2)
    assert maps_of(tmp_path)
    assert list(tmp_path.iterdir()) == []
    del spilled, store
    assert maps_of(tmp_path) == []


def test_a_scratch_file_that_is_mostly_dead_gives_way_under_its_readers(tmp_path: Path) -> None:
    store = HistoryStore(spill=tmp_path, window=1)
    store.add(A, [answer(epoch=0, token_ids=range(8))])
    (held,) = store.answers(A)
    store.add(A, [answer(epoch=1, token_ids=range(7))])
    (before,) = maps_of(tmp_path)
    store.add(A, [answer(epoch=2, token_ids=range(3))])
    assert len(maps_of(tmp_path)) == 2
    assert held.token_ids.tolist() == list(range(8))
    del held
    (after,) = maps_of(tmp_path)
    assert before != after
    assert store.answers(A)[0].token_ids.tolist() == [0, 1, 2]
    store.check_integrity()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    store = HistoryStore(spill=tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RunError, match=rf"^history\.spill='{tmp_path}': No space left on device$"):
        store.add(A, [answer()])


def test_stores_of_one_process_share_their_tokens() -> None:
    """A trainer has a store for each server that it speaks with."""
    one, two = HistoryStore(), HistoryStore()
    one.add(prompt("a"), [answer()])
    (known,) = one.answers(prompt("a"))
    two.add(prompt("a"), [known])
    (again,) = two.answers(prompt("a"))
    assert again.token_ids is known.token_ids
    assert two.bytes == one.bytes
    given = answer()
    one.add(prompt("b"), [given])
    given.token_ids[0] = 9
    assert one.answers(prompt("b"))[0].token_ids.tolist() == [1, 2, 3]
    view = np.arange(4, dtype=np.int32)[1:]
    view.flags.writeable = False
    one.add(prompt("c"), [replace(given, token_ids=view)])
    assert not np.shares_memory(one.answers(prompt("c"))[0].token_ids, view), "it would keep a larger array"


def test_the_pool_may_be_looked_at_while_another_thread_adds_to_it():
    """As the thread that listens to workers does; an iteration over what changes is an error."""
    store, over, found = HistoryStore(window=2, max_prompts=300), threading.Event(), []

    def look() -> None:
        while not over.is_set():
            try:
                store.newest()
            except RuntimeError as error:
                found.append(error)
                return

    readers = [threading.Thread(target=look) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for reader in readers:
            reader.start()
        for number in range(2000):
            store.add(prompt(str(number)), [answer(token_ids=[number, 1, 2])])
    finally:
        sys.setswitchinterval(before)
        over.set()
        for reader in readers:
            reader.join()
    assert found == []
