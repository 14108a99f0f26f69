"""Suffix indexes over the history, kept up to date off the critical path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from rhymerl.history.entries import Name
from rhymerl.history.index import SuffixIndex
from rhymerl.history.pool import pooled
from rhymerl.history.records import Answer, HistoryDelta, PromptChange
from rhymerl.types import FloatArray, IntArray, Split

_SMALL_TOKENS = 4096  # sorted in half a millisecond
_POOL = ""  # in the place of a prompt's key


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedAnswers:
    """A prompt's earlier answers, ready to be drafted from. A = answers."""

    prompt_token_ids: IntArray
    index: SuffixIndex
    weights: FloatArray  # [A] by how recent and how good
    rewards: FloatArray  # [A]
    ages: IntArray  # [A] in epochs; 0 = of the prompt's newest

    @classmethod
    def of(
        cls, prompt: IntArray, answers: Sequence[Answer], *, recency: float = 1.0, advantage_tilt: float = 0.0
    ) -> SealedAnswers:
        """Index answers. An advantage that is no number tilts nothing."""
        epochs = np.array([answer.epoch for answer in answers], np.int32)
        ages = epochs.max(initial=0) - epochs
        advantages = np.nan_to_num([answer.advantage for answer in answers], posinf=0.0, neginf=0.0)
        return cls(
            prompt_token_ids=prompt,
            index=SuffixIndex([prompt] * len(answers), [answer.token_ids for answer in answers]),
            weights=np.power(recency, ages, dtype=np.float64) * np.exp(np.clip(advantage_tilt * advantages, -99, 99)),
            rewards=np.array([answer.reward for answer in answers], np.float64),
            ages=ages,
        )

    @property
    def bytes(self) -> int:
        """The bytes of the index; the answers' own arrays are the store's."""
        return self.index.bytes


Sealed = SealedAnswers | SuffixIndex  # of a prompt, or of a pool


@dataclass(kw_only=True, eq=False)
class SealedHistory:
    """Follows a HistoryStore and keeps one index a prompt over the answers of its last `window` epochs.

    With `pools` it keeps one a split, too, over the newest answers to all prompts (history/pool.py). Large indexes are
    built by a thread that holds no lock while it sorts; a new one takes the old one's place at once, so that readers
    never see a half-built one. An answer's weight is recency ** age * exp(advantage_tilt * advantage).
    """

    window: int
    recency: float = 1.0
    advantage_tilt: float = 0.0
    pools: bool = False

    def __post_init__(self) -> None:
        self._answers: dict[Name, tuple[IntArray, tuple[Answer, ...]]] = {}  # in the order of their last change
        self._sealed: dict[Name, Sealed] = {}
        self._stale: set[Name] = set()  # of these the newest index has not been asked for
        self._building: dict[Name, Future[Sealed]] = {}
        self._builder: ThreadPoolExecutor | None = None

    def follow(self, delta: HistoryDelta, *, builds: bool = True) -> None:
        """Apply what has changed. With `builds` indexes follow in the background, else when they are wanted."""
        if delta.is_snapshot:
            self._answers, self._sealed, self._building, self._stale = {}, {}, {}, set()
        changed = [(change.split, change.key) for change in delta]
        for change, name in zip(delta, changed, strict=True):
            self._apply(change, name)
        if self.pools:
            pools = dict.fromkeys(_pool(split) for split, _ in changed)
            self._stale.update(pools)
            changed += pools
        for name in changed if builds else ():
            if name in self._stale:
                self._build(name)

    def _apply(self, change: PromptChange, name: Name) -> None:
        prompt, known = self._answers.pop(name, (change.prompt_token_ids, ()))
        if change.is_forgotten:
            prompt, known = change.prompt_token_ids, ()
        answers = [answer for answer in (*known, *change.added) if answer.epoch >= change.first_epoch]
        newest = max((answer.epoch for answer in answers), default=0)
        answers = [answer for answer in answers if answer.epoch > newest - self.window]
        if change.is_forgotten or not answers:
            self._sealed.pop(name, None)
            self._building.pop(name, None)
            self._stale.discard(name)
        if answers:
            self._answers[name] = prompt, tuple(answers)
            self._stale.add(name)

    def _build(self, name: Name) -> None:
        """Build an index in the background; an older one that is being built is not waited for."""
        self._stale.discard(name)
        self._building[name] = self._submit(self._make(name))

    def _make(self, name: Name) -> Callable[[], Sealed]:
        split, key = name
        if key == _POOL:
            pool = pooled(each for other, each in reversed(self._answers.items()) if other[0] == split)
            prompts = [prompt for prompt, answers in pool for _ in answers]
            return lambda: SuffixIndex(prompts, [answer.token_ids for _, group in pool for answer in group])
        prompt, answers = self._answers[name]
        return lambda: SealedAnswers.of(prompt, answers, recency=self.recency, advantage_tilt=self.advantage_tilt)

    def _submit(self, build: Callable[[], Sealed]) -> Future[Sealed]:
        if self._builder is None:
            self._builder = ThreadPoolExecutor(1, thread_name_prefix="rhymerl-history")
        return self._builder.submit(build)

    def install(self, name: Name, *, wait: bool = True) -> None:
        """Install the prompt's newest index if it is built, or once it is (`wait`); build a small one at once."""
        if name in self._stale:
            if wait or self._is_small(name):
                self._stale.discard(name)
                self._building.pop(name, None)
                self._sealed[name] = self._make(name)()
                return
            self._build(name)
        pending = self._building.get(name)
        if pending is not None and (wait or pending.done()):
            self._sealed[name] = pending.result()
            del self._building[name]

    def _is_small(self, name: Name) -> bool:
        return name in self._answers and sum(map(len, self._answers[name][1])) <= _SMALL_TOKENS

    def pool(self, split: Split, *, wait: bool = True) -> SuffixIndex | None:
        """Return the index over the newest answers to all prompts, installed; None where there is none yet."""
        self.install(_pool(split), wait=wait)
        found = self._sealed.get(_pool(split))
        return found if isinstance(found, SuffixIndex) else None

    def get(self, name: Name, prompt: IntArray | None) -> SealedAnswers | None:
        """Return the prompt's installed index; None when there is none, or when the name belongs to another prompt.

        Of a later part of an episode, which has other tokens, the `prompt` is None.
        """
        sealed = self._sealed.get(name)
        if not isinstance(sealed, SealedAnswers):
            return None
        known = sealed.prompt_token_ids
        return sealed if prompt is None or prompt is known or np.array_equal(known, prompt) else None

    @property
    def bytes(self) -> int:
        """The bytes of all indexes that are built."""
        built = [pending.result() for pending in self._building.values() if pending.done()]
        return sum(sealed.bytes for sealed in (*self._sealed.values(), *built))

    def close(self) -> None:
        """End the thread after its pending indices."""
        if self._builder is not None:
            self._builder.shutdown(wait=True)
            self._builder = None


def _pool(split: Split) -> Name:
    return split, _POOL
