"""The store against a plain dict that recomputes everything, under random operations."""

from __future__ import annotations

import tempfile
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rhymerl.history import Answer, HistoryDelta, HistoryStore
from tests.history.answers import answer, prompt

PROMPTS = [prompt("a"), prompt("b"), prompt("c", ()), prompt("a", (7, 9)), prompt("b", (7, 8, 8))]
SPLITS = ("train", "validation")

answers = st.builds(
    answer,
    epoch=st.integers(0, 3),
    sample=st.integers(0, 1),
    token_ids=st.lists(st.integers(0, 3), max_size=4),
    reward=st.sampled_from([0.0, 1.0, float("nan")]),
    finish_reason=st.sampled_from(["stop", "length"]),
    policy_version=st.integers(0, 2),
)
limits = st.none() | st.integers(1, 3)
Known = dict[tuple[str, str], tuple[tuple[int, ...], list[Answer]]]  # longest unused first


class Twin:
    """The rules of the store, in the fewest words."""

    def __init__(self, window: int, max_tokens: int | None, max_prompts: int | None) -> None:
        self.window, self.max_tokens, self.max_prompts = window, max_tokens or 10**9, max_prompts or 10**9
        self.known: Known = {}
        self.collisions = 0

    def add(self, name: tuple[str, str], tokens: tuple[int, ...], new: list[Answer]) -> None:
        if name in self.known and self.known[name][0] != tokens:
            self.collisions += 1
            return
        kept = list(self.known.pop(name, (tokens, []))[1])
        for each in new:
            rivals = [old for old in kept if (old.epoch, old.sample) == (each.epoch, each.sample)]
            if all(old.policy_version < each.policy_version for old in rivals):
                kept = [old for old in kept if old not in rivals] + [each]
        kept = [each for each in kept if each.epoch > max(old.epoch for old in kept) - self.window]
        while sum(map(len, kept)) > self.max_tokens:
            kept = [each for each in kept if each.epoch > min(old.epoch for old in kept)]
        if kept:
            self.known[name] = tokens, sorted(kept, key=lambda each: (each.epoch, each.sample))

    def trim(self) -> None:
        while len(self.known) > self.max_prompts or self.num_tokens > self.max_tokens:
            evaluated = [name for name in self.known if name[0] == "validation"]
            del self.known[[*evaluated, *self.known][0]]

    @property
    def num_tokens(self) -> int:
        return sum(len(each) for _, kept in self.known.values() for each in kept)


class Reader:
    """Follows a store by its deltas alone, as a drafter does."""

    def __init__(self) -> None:
        self.version = 0
        self.known: Known = {}

    def apply(self, delta: HistoryDelta) -> None:
        if delta.is_snapshot:
            self.known = {}
        assert len({(change.split, change.key) for change in delta.changes}) == len(delta.changes)
        for change in delta.changes:
            name = change.split, change.key
            if change.is_forgotten:
                self.known.pop(name, None)
            kept = [each for each in self.known.get(name, ((), []))[1] if each.epoch >= change.first_epoch]
            if kept or change.added:
                kept = sorted([*kept, *change.added], key=lambda each: (each.epoch, each.sample))
                self.known[name] = tuple(change.prompt_token_ids.tolist()), kept
        self.version = delta.version


class StoreMachine(RuleBasedStateMachine):
    @initialize(
        window=st.integers(1, 3),
        max_tokens=st.none() | st.integers(1, 20),
        max_prompts=limits,
        log_size=st.sampled_from([1, 2, 100]),
        spilled=st.booleans(),
    )
    def start(self, spilled: bool, log_size: int, **caps: Any) -> None:
        self.caps = caps
        self.settings = {**caps, "log_size": log_size, "spill": tempfile.gettempdir() if spilled else None}
        self.store = HistoryStore(**self.settings)
        self.twin = Twin(**caps)
        self.readers = [Reader(), Reader()]

    @rule(each=st.sampled_from(PROMPTS), new=st.lists(answers, max_size=4), split=st.sampled_from(SPLITS))
    def add(self, each: Any, new: list[Answer], split: Any) -> None:
        version = self.store.version
        self.store.add(each, new, split)
        assert self.store.version == version + 1
        self.twin.add((split, each.key), tuple(each.token_ids.tolist()), new)
        self.twin.trim()

    @rule(groups=st.lists(st.tuples(st.sampled_from(PROMPTS), st.lists(answers, max_size=4)), max_size=3))
    def merge(self, groups: list[Any]) -> None:
        other = HistoryStore(window=3)
        for each, new in groups:
            other.add(each, new)
        for change in other.snapshot():
            self.twin.add((change.split, change.key), tuple(change.prompt_token_ids.tolist()), list(change.added))
        self.twin.trim()
        self.store.merge(other)

    @rule(reader=st.integers(0, 1))
    def follow(self, reader: int) -> None:
        self.readers[reader].apply(self.store.deltas(self.readers[reader].version))
        assert self.readers[reader].known == self.twin.known

    @rule(in_place=st.booleans())
    def save_and_load(self, in_place: bool) -> None:
        state = self.store.state_dict()
        if not in_place:
            self.store, self.readers = HistoryStore(**self.settings), [Reader(), Reader()]
            self.twin.collisions = 0
        self.store.load_state_dict(state)
        assert self.store.state_dict() == state

    @invariant()
    def equals_the_twin(self) -> None:
        store, known = self.store, self.twin.known
        store.check_integrity()
        fresh = Reader()
        fresh.apply(store.snapshot())
        assert list(fresh.known.items()) == list(known.items())
        assert (store.num_prompts, store.num_tokens) == (len(known), self.twin.num_tokens)
        arrays = [array for change in store.snapshot() for array in (change.prompt_token_ids, *tokens_of(change))]
        assert store.bytes == sum(array.nbytes for array in arrays)

    @invariant()
    def answers_of_exactly_this_prompt(self) -> None:
        for each in PROMPTS:
            for split in SPLITS:
                tokens, expected = self.twin.known.get((split, each.key), (None, []))
                is_other = tokens is not None and tokens != tuple(each.token_ids.tolist())
                self.twin.collisions += is_other
                assert list(self.store.answers(each, split)) == ([] if is_other else expected)
        assert self.store.num_collisions == self.twin.collisions


def tokens_of(change: Any) -> list[Any]:
    return [each.token_ids for each in change.added]


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=80, stateful_step_count=30)
