"""Drafts from earlier answers to the same prompt and from running ones (HistoSpec, arXiv 2508.18588)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rhymerl.drafters.base import Drafter
from rhymerl.drafters.grow import AnswerWeights, Occurrences, Rules, Trees, grow_trees
from rhymerl.drafters.live import LiveGroup
from rhymerl.drafts import Draft, DraftBatch
from rhymerl.errors import at_least, check_ranges, require
from rhymerl.history.entries import Name
from rhymerl.history.index import REACH, LiveIndex, SuffixIndex
from rhymerl.history.records import HistoryDelta
from rhymerl.history.sealed import SealedAnswers, SealedHistory
from rhymerl.types import Completion, IndexArray, IntArray, MaybeInfinite, RolloutRequest, Split

_POOL_MATCHES = 32  # more are never better
_IDLE_GROUPS = 256  # prompts without running answers whose tokens are kept for siblings that may still come

GroupKey = tuple[str, ...]


@dataclass(kw_only=True, eq=False)
class HistoryTreeDrafter(Drafter):
    """Trees of the tokens that followed the context's longest suffixes in the prompt's earlier and running answers.

    An occurrence that shares n tokens with the context votes with weight length_weight ** n * recency ** age *
    exp(advantage_tilt * advantage). Its age counts epochs, at most `window` of them (0 = no history). `own` adds the
    request's own prompt and tokens, `siblings` the other running answers; `others` weighs the newest answers to all
    prompts (0 = none). Only suffixes of `min_match` to `max_match` tokens count, and only the `max_matches` longest of
    each index. A node's score is the product of the vote shares on its path, where `escape` votes go to unseen tokens.
    The most probable nodes are taken first, at most `max_branches` below one (1 = a chain), chosen by probability or by
    the summed `reward` of the answers below.

    With `deterministic` a request waits for its prompt's index; otherwise the index is used once it is ready. None
    follows the Trainer.
    """

    window: int = at_least(0, 8)
    own: bool = True
    siblings: bool = True
    others: float = 0.1
    min_match: int = at_least(1, 1)
    max_match: int = REACH
    max_matches: int = at_least(1, 64)
    max_branches: int | None = at_least(1, None)
    priority: Literal["probability", "reward"] = "probability"  # which nodes a budget takes first
    length_weight: MaybeInfinite = 5.0  # by how much a token more that is shared with the context counts
    recency: float = 0.8  # by how much an answer of each earlier epoch counts less
    advantage_tilt: float = 0.0  # how much more better answers count; 0: all alike
    escape: float = 0.3
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        known_matches = f"from min_match={self.min_match} to {REACH}"
        require(self.min_match <= self.max_match <= REACH, "max_match", self.max_match, known_matches)
        require(self.priority in ("probability", "reward"), "priority", self.priority, "probability or reward")
        weights = "1 or more; .inf counts the longest suffixes alone"
        require(self.length_weight >= 1, "length_weight", self.length_weight, weights)
        require(0 < self.recency <= 1, "recency", self.recency, "above 0, at most 1")
        require(math.isfinite(self.advantage_tilt), "advantage_tilt", self.advantage_tilt, "a finite number")
        for name in ("escape", "others"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "0 or more, and finite")
        self._history = SealedHistory(
            window=max(self.window, 1), recency=self.recency, advantage_tilt=self.advantage_tilt, pools=self.others > 0
        )
        self._rules = Rules(
            use_own=self.own,
            use_siblings=self.siblings,
            pool_weight=float(self.others),
            length_weight=float(self.length_weight),
            escape=float(self.escape),
            max_branches=self.max_branches or 3 * self.max_matches,  # more than there can be
            by_reward=self.priority == "reward",
        )
        self._bounds = {"most": self.max_matches, "shortest": self.min_match, "longest": self.max_match}
        self._pool_bounds = {**self._bounds, "most": min(self.max_matches, _POOL_MATCHES)}
        self._groups: dict[GroupKey, LiveGroup] = {}
        self._key_of: dict[str, GroupKey] = {}  # by id of a running request that has asked
        self._behind: list[LiveGroup] = []  # have tokens that nothing is found at yet
        self._is_launched = False  # the engine has said so of the last pass, so it will of the next
        self._num_asked = self._num_passes = 0  # of requests, since the history was followed
        self._idle: OrderedDict[GroupKey, None] = OrderedDict()  # longest idle first

    # -- what is known -------------------------------------------------------------------------------------------

    def follow(self, delta: HistoryDelta) -> None:
        if self.window > 0:
            # While nobody wants drafts, indexes would be built for nothing, on cores that others need.
            self._history.follow(delta, builds=2 * self._num_asked >= self._num_passes)
        self._num_asked = self._num_passes = 0
        for key in list(self._idle):  # their answers are history now
            self._forget(key)

    def finish(self, completion: Completion) -> None:
        self._num_passes += completion.num_passes
        if not self._groups:  # nobody has asked
            return
        request = completion.request
        key = self._key_of.pop(request.id, None) or self._group_key(request)
        group = self._groups.get(key)
        if group is None:
            return
        group.finish(completion)
        if not group.running:
            self._idle[key] = None
        if len(self._idle) > _IDLE_GROUPS:
            self._forget(next(iter(self._idle)))

    def _forget(self, key: GroupKey) -> None:
        del self._groups[key], self._idle[key]

    def close(self) -> None:
        self._history.close()
        for table in (self._groups, self._key_of, self._idle, self._behind):
            table.clear()

    @property
    def bytes(self) -> int:
        """Return the bytes of all indexes, over earlier answers and over running ones."""
        return self._history.bytes + self.live_bytes

    @property
    def live_bytes(self) -> int:
        """Return the bytes of the indexes over running answers, room to grow included."""
        return sum(group.index.bytes for group in self._groups.values())

    # -- drafts --------------------------------------------------------------------------------------------------

    def propose(self, request: RolloutRequest, context: IntArray, budget: int) -> Draft:
        return self.propose_batch([request], [context], [budget]).draft(0)

    def propose_batch(
        self, requests: Sequence[RolloutRequest], contexts: Sequence[IntArray], budgets: Sequence[int]
    ) -> DraftBatch:
        self._num_asked += len(requests)
        limits, trees = np.asarray(budgets, np.int32), Trees.empty(len(requests), max(budgets, default=0))
        members: dict[GroupKey, list[int]] = {}
        for line, request in enumerate(requests):
            key = self._key_of.get(request.id) or self._enter(request)
            members.setdefault(key, []).append(line)
        wait = bool(self.deterministic)
        splits = dict.fromkeys(request.split for request in requests)
        pools = {split: self._history.pool(split, wait=wait) for split in splits}
        askers = [self._asker(key, lines, requests, contexts, pools) for key, lines in members.items()]
        if not self._is_launched:
            self._sort_in()
        self._is_launched = False
        for asker in askers:
            self._grow(asker, limits, trees)
        return trees.packed()

    def _asker(
        self,
        key: GroupKey,
        lines: Sequence[int],
        requests: Sequence[RolloutRequest],
        contexts: Sequence[IntArray],
        pools: Mapping[Split, SuffixIndex | None],
    ) -> _Asker:
        """Take up what is new of a prompt and its running answers."""
        group, request = self._groups[key], requests[lines[0]]
        rows = group.extend([requests[line].id for line in lines], [contexts[line] for line in lines])
        self._behind.append(group)
        name = _key(request)
        self._history.install(name, wait=bool(self.deterministic))
        sealed = self._history.get(name, None if request.segment else request.prompt.token_ids)
        pool = pools[request.split] or _NO_HISTORY.index
        return _Asker(group.index, rows, sealed or _NO_HISTORY, pool, np.array(lines))

    def catch_up(self) -> None:
        self._is_launched = True
        self._sort_in()

    def _sort_in(self) -> None:
        for group in self._behind:
            group.catch_up()
        self._behind.clear()

    def _enter(self, request: RolloutRequest) -> GroupKey:
        """Find a group for a request that asks for the first time."""
        key, prompt = self._group_key(request), request.prompt.token_ids
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = LiveGroup(prompt)
        if group.prompt is not prompt and not np.array_equal(group.prompt, prompt):
            key = (*key, request.id)  # two prompts under one key do not meet
            self._groups[key] = LiveGroup(prompt)
        self._key_of[request.id] = key
        self._idle.pop(key, None)
        return key

    def _group_key(self, request: RolloutRequest) -> GroupKey:
        return _key(request) if self.siblings else (*_key(request), request.id)

    def _grow(self, asker: _Asker, limits: IntArray, trees: Trees) -> None:
        live, sealed, history = asker.live, asker.sealed, asker.sealed.index
        ends = live.ends[asker.rows]
        here, there = live.matches(live.text, ends, **self._bounds), history.matches(live.text, ends, **self._bounds)
        elsewhere = asker.pool.matches(live.text, ends, **self._pool_bounds)
        grow_trees(
            Occurrences(live.text, live.starts, *here),
            Occurrences(history.text, history.starts, *there),
            Occurrences(asker.pool.text, asker.pool.starts, *elsewhere),
            AnswerWeights(sealed.weights, sealed.rewards, sealed.ages),
            self._rules,
            asker.rows,
            limits,
            asker.lines,
            trees,
        )


@dataclass(slots=True)
class _Asker:
    """The running answers to a prompt that ask for drafts."""

    live: LiveIndex
    rows: IndexArray  # [Q] in it
    sealed: SealedAnswers
    pool: SuffixIndex
    lines: IndexArray  # [Q] of the batch


_NO_HISTORY = SealedAnswers.of(np.empty(0, np.int32), [])


def _key(request: RolloutRequest) -> Name:
    return request.split, request.prompt.key
