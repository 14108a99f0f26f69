"""The history of past answers; drafters and schedulers are readers that follow it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from rhymerl.errors import ConfigError, DataError, at_least, check_ranges
from rhymerl.folders import open_folder
from rhymerl.history.entries import AnswerKey, Entry, EvictionLog, Name, check_answer, fitting, merge_answers, newer
from rhymerl.history.files import FORMAT, read_sections, write_sections
from rhymerl.history.packing import PackedPrompt, pack, unpack
from rhymerl.history.pool import pooled
from rhymerl.history.records import SPLITS, Answer, HistoryDelta, PromptChange
from rhymerl.history.tokens import TOKEN_BYTES, TokenFile, TokenMemory
from rhymerl.types import IntArray, Prompt, Split

_NO_TOKENS = np.zeros(0, np.int32)
_NO_TOKENS.flags.writeable = False

NO_VERSION = -1  # of a reader that has been told nothing


@dataclass(kw_only=True, eq=False, repr=False)
class HistoryStore:
    """Keeps past answers by prompt, within a window of epochs and caps on tokens and prompts.

    The newest `window` epochs of each prompt stay, or fewer if these alone have more than `max_tokens`. When
    `max_tokens` (of all answers) or `max_prompts` is exceeded, the prompts whose last `add` is longest ago are evicted
    with all of their answers. Prompts of the split `validation` go first, so that training's history does not depend on
    evaluations. Reading does not count as use, so the content depends on the adds alone. If two answers have the same
    prompt, epoch and sample, the one of the newer policy version stays, else the first.

    `spill` is a directory: token ids then live in a memory-mapped scratch file there, which has no name and is gone
    with the process. `log_size` is how many evictions are remembered for readers that lag behind. Raises ValueError for
    an argument that is out of range.
    """

    window: int = at_least(1, 8)
    max_tokens: int | None = at_least(1, None)
    max_prompts: int | None = at_least(1, None)
    spill: str | Path | None = None
    log_size: int = at_least(1, 65_536)

    def __post_init__(self) -> None:
        check_ranges(self)
        self.version = 0  # of this object: it is not saved
        self.num_tokens = 0  # of answers
        self.num_answers = 0
        self.num_collisions = 0  # adds and look-ups that met another prompt under their key
        self.num_evicted = 0  # prompts
        self._tokens: TokenMemory = TokenMemory() if self.spill is None else TokenFile(_opened(self.spill))
        self._entries: dict[Name, Entry] = {}  # longest unused first, so also in the order of `used_at`
        self._validation: dict[Name, None] = {}  # those of this split, in the same order
        self._log = EvictionLog(self.log_size)
        self._lock = threading.Lock()  # workers apart are told of the pool while a step is learned

    # -- answers -------------------------------------------------------------------------------------------------

    @property
    def num_prompts(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Return the bytes of all token ids of answers and prompts, in memory or in the scratch file."""
        return TOKEN_BYTES * self._tokens.num_live

    def add(self, prompt: Prompt, answers: Iterable[Answer], split: Split = "train") -> None:
        """Learn answers and raise `version`. Raises ValueError, before anything changes, for a broken answer.

        Answers to a prompt whose key is taken by other token ids are counted and left out.
        """
        _check_split(split)
        listed = list(answers)
        for answer in listed:
            check_answer(answer)
        with self._lock:
            self.version += 1
            self._insert((split, prompt.key), prompt.token_ids, listed)
            self._trim()

    def answers(self, prompt: Prompt, split: Split = "train") -> tuple[Answer, ...]:
        """Return the answers to exactly this prompt, oldest epoch first, then by sample."""
        _check_split(split)
        entry = self._entries.get((split, prompt.key))
        if entry is None:
            return ()
        if not np.array_equal(entry.token_ids, prompt.token_ids):
            self.num_collisions += 1
            return ()
        return tuple(entry.answers.values())

    def newest(self, split: Split = "train") -> list[PackedPrompt]:
        """Return the pool of a split (history/pool.py)."""
        _check_split(split)
        with self._lock:
            entries = ((name, entry) for name, entry in reversed(self._entries.items()) if name[0] == split)
            pool = pooled(((name, entry.token_ids), tuple(entry.answers.values())) for name, entry in entries)
        return [
            PackedPrompt(split=split, key=key, token_ids=token_ids, answers=tuple(answers))
            for ((_, key), token_ids), answers in pool
        ]

    def merge(self, other: HistoryStore) -> None:
        """Add another store's answers as one change; its prompts then count as last used, in its order."""
        with self._lock:
            self.version += 1
            for name, entry in list(other._entries.items()):
                self._insert(name, entry.token_ids, list(entry.answers.values()))
            self._trim()

    def _insert(self, name: Name, token_ids: IntArray, answers: Iterable[Answer]) -> None:
        entry = self._entries.get(name)
        if entry is not None and not np.array_equal(entry.token_ids, token_ids):
            self.num_collisions += 1
            return
        known = entry.answers if entry is not None else {}
        after = fitting(merge_answers(known, answers), window=self.window, max_tokens=self.max_tokens)
        if after:
            entry = entry if entry is not None else Entry(token_ids=self._tokens.put(token_ids))
            self._update(name, entry, after)
            self._use(name, entry)
        elif entry is not None:
            self._evict(name)

    def _use(self, name: Name, entry: Entry) -> None:
        self._entries.pop(name, None)
        self._entries[name] = entry
        entry.used_at = self.version
        if name[0] == "validation":
            self._validation.pop(name, None)
            self._validation[name] = None

    def _update(self, name: Name, entry: Entry, after: Mapping[AnswerKey, Answer]) -> None:
        before = entry.answers
        new = {location for location, answer in after.items() if before.get(location) is not answer}
        if not new and len(after) == len(before):
            return
        kept = {location: self._keep(answer) if location in new else answer for location, answer in after.items()}
        for location, answer in before.items():
            if kept.get(location) is not answer:
                self._drop(answer)
        if not new.isdisjoint(before):  # readers cannot replace an answer, so they learn the prompt anew
            self._log.add(name, self.version)
            entry.added_at = {}
        entry.answers = kept
        entry.added_at = {location: entry.added_at.get(location, self.version) for location in kept}
        entry.changed_at = self.version

    def _keep(self, answer: Answer) -> Answer:
        kept = replace(answer, token_ids=self._tokens.put(answer.token_ids))
        self.num_answers += 1
        self.num_tokens += len(answer)
        return kept

    def _drop(self, answer: Answer) -> None:
        self.num_answers -= 1
        self.num_tokens -= len(answer)
        self._tokens.drop(answer.token_ids)

    # -- limits --------------------------------------------------------------------------------------------------

    def _trim(self) -> None:
        while self._is_over():
            self._evict(next(iter(self._validation or self._entries)))
        if self._tokens.is_mostly_dead:
            self._compact()

    def _is_over(self) -> bool:
        over_tokens = self.max_tokens is not None and self.num_tokens > self.max_tokens
        return over_tokens or (self.max_prompts is not None and self.num_prompts > self.max_prompts)

    def _evict(self, name: Name) -> None:
        entry = self._entries.pop(name)
        self._validation.pop(name, None)
        for answer in entry.answers.values():
            self._drop(answer)
        self._tokens.drop(entry.token_ids)
        self.num_evicted += 1
        self._log.add(name, self.version)

    def _compact(self) -> None:
        fresh = self._tokens.fresh()
        for entry in self._entries.values():
            entry.token_ids = fresh.put(entry.token_ids)
            for location, answer in entry.answers.items():
                entry.answers[location] = replace(answer, token_ids=fresh.put(answer.token_ids))
        self._tokens = fresh

    # -- readers -------------------------------------------------------------------------------------------------

    def snapshot(self) -> HistoryDelta:
        """Return all prompts and answers, the least recently used prompt first."""
        changes = [_change(name, entry, since=-1, is_forgotten=False) for name, entry in self._entries.items()]
        return HistoryDelta(version=self.version, is_snapshot=True, changes=tuple(changes))

    def deltas(self, since: int) -> HistoryDelta:
        """Return the changes since version `since`; a snapshot if they are lost.

        A reader at `since` that applies them knows what the store knows. They are lost when the log of evictions has
        been cut since then, and when another state has been loaded. A reader that knows nothing is at `NO_VERSION`.
        """
        if not self._log.start <= since <= self.version:
            return self.snapshot()
        evicted = self._log.since(since)
        changes = [_forget(name) for name in evicted if name not in self._entries]
        again = set(evicted)
        for name, entry in newer(self._entries, since, lambda entry: entry.used_at):
            if entry.changed_at > since:
                changes.append(_change(name, entry, since=since, is_forgotten=name in again))
        return HistoryDelta(version=self.version, is_snapshot=False, changes=tuple(changes))

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all answers as bytes and numbers, without settings and versions."""
        return {"format": FORMAT, "sections": pack(self._packed())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all answers; window and caps apply. Raises DataError, before anything changes."""
        if state.get("format") != FORMAT:
            raise DataError(f"history in the checkpoint: its format is {state.get('format')!r}, expected {FORMAT}")
        try:
            prompts = unpack(state["sections"])
        except (KeyError, ValueError) as error:
            raise DataError(f"history in the checkpoint: {error}") from error
        self._replace_by(prompts)

    def save(self, path: str | Path, tokenizer: str) -> None:
        """Write a file for `load`; `tokenizer` is the fingerprint of the tokenizer of the token ids."""
        write_sections(path, pack(self._packed()), tokenizer=tokenizer)

    @classmethod
    def load(cls, path: str | Path, *, tokenizer: str, **settings: Any) -> Self:
        """Return a store with these settings and the file's answers.

        Raises DataError when the file is truncated, corrupt, of a newer format or of another tokenizer.
        """
        sections = read_sections(path, tokenizer=tokenizer)
        try:
            prompts = unpack(sections)
        except ValueError as error:
            raise DataError(f"history file {str(path)!r}: corrupt: {error}") from error
        store = cls(**settings)
        store._replace_by(prompts)
        return store

    def _packed(self) -> list[PackedPrompt]:
        return [
            PackedPrompt(split=split, key=key, token_ids=entry.token_ids, answers=tuple(entry.answers.values()))
            for (split, key), entry in self._entries.items()
        ]

    def _replace_by(self, prompts: Iterable[PackedPrompt]) -> None:
        self.version += 1
        self._log.clear(self.version)
        self._entries, self._validation, self._tokens = {}, {}, self._tokens.fresh()
        self.num_answers = self.num_tokens = 0
        for prompt in prompts:
            self._insert((prompt.split, prompt.key), prompt.token_ids, prompt.answers)
        self._trim()

    def check_integrity(self) -> None:
        """Raise AssertionError when counts, order, window, caps or the log contradict one another."""
        entries = list(self._entries.values())
        answers = [answer for entry in entries for answer in entry.answers.values()]
        assert self.num_answers == len(answers)
        assert self.num_tokens == sum(map(len, answers))
        assert self._tokens.num_live == self.num_tokens + sum(len(entry.token_ids) for entry in entries)
        assert not self._is_over()
        assert not self._tokens.is_mostly_dead
        used = [entry.used_at for entry in entries]
        assert used == sorted(used)
        assert list(self._validation) == [name for name in self._entries if name[0] == "validation"]
        assert all(used_at <= self.version for used_at in used)
        self._log.check_integrity(self.version)
        for entry in entries:
            entry.check_integrity(self.window)


def _opened(spill: str | Path) -> Path:
    """Return the directory, made if need be. Raises ValueError when it cannot be written to."""
    try:
        return open_folder(spill, setting="spill")
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _check_split(split: Split) -> None:
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: expected one of {', '.join(SPLITS)}")


def _change(name: Name, entry: Entry, *, since: int, is_forgotten: bool) -> PromptChange:
    split, key = name
    (first_epoch, _), *_ = entry.answers
    return PromptChange(
        split=split,
        key=key,
        is_forgotten=is_forgotten,
        first_epoch=first_epoch,
        prompt_token_ids=entry.token_ids,
        added=tuple(answer for location, answer in entry.answers.items() if entry.added_at[location] > since),
    )


def _forget(name: Name) -> PromptChange:
    split, key = name
    return PromptChange(split=split, key=key, is_forgotten=True, first_epoch=0, prompt_token_ids=_NO_TOKENS, added=())
