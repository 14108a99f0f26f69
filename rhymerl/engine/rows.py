"""Rows: the token sequences that have keys and values in the store, as a struct of arrays.

A row is either a running request or a prefix: a prompt's tokens but the last, computed once and read by all samples of
its group. R = rows, C = the longest sequence. A row has `length` tokens: the first `cached` of them have keys and
values, and the first `shared` of those belong to its prefix. Where all layers have windows, no token to come sees the
first `unseen`: what the row owned of them is free. A running row always has at least one token that is not cached: its
last one, the root from which the next token is sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rhymerl.drafts import NOT_DRAFTED, DraftSource
from rhymerl.engine.noise import noise_counters
from rhymerl.replayed import KeptSets, RouteArray
from rhymerl.types import (
    BoolArray,
    Completion,
    FinishReason,
    FloatArray,
    IndexArray,
    IntArray,
    Output,
    RolloutRequest,
)

if TYPE_CHECKING:
    from rhymerl.engine.routes import RouteStore

NOBODY = -1
_FREED_TOGETHER = 16  # tokens: finding what is unseen costs more than their memory


class SlotPool:
    """Numbers of free slots. Which slot a token gets is of no consequence for any value."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = np.arange(num_slots, dtype=np.int64)[::-1].copy()
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        return self._num_free

    def take(self, count: int) -> IndexArray:
        """Return `count` slots; the caller has checked `num_free`."""
        assert count <= self._num_free, f"took {count} of {self._num_free} free slots"
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def give(self, slots: IndexArray) -> None:
        """Slots that nobody reads any more."""
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)

    def check_integrity(self, held: Iterable[IndexArray]) -> None:
        """Raise AssertionError unless every slot is free or held exactly once."""
        everything = np.concatenate([self._free[: self._num_free], *held])
        missing = self.num_slots - len(np.unique(everything))
        assert len(everything) == self.num_slots and missing == 0, (
            f"KV slots: {len(everything)} accounted for, {self.num_slots} exist, {missing} missing"
        )


@dataclass(slots=True)
class Prefix:
    """A prompt's shared part: its row, and how many running rows read it."""

    row: int
    tokens: bytes
    num_readers: int = 0


@dataclass(slots=True)
class Rows:
    """All per-row state; a row number is valid from `enter` to `leave`."""

    num_rows: int
    context: int
    pool: SlotPool
    tokens: npt.NDArray[np.int32] = field(init=False)  # [R, C]
    slots: IndexArray = field(init=False)  # [R, C]
    logprobs: npt.NDArray[np.float64] = field(init=False)  # [R, C] of response tokens
    versions: npt.NDArray[np.int32] = field(init=False)  # [R, C] of response tokens
    sources: npt.NDArray[np.int8] = field(init=False)  # [R, C] of response tokens: DraftSource or NOT_DRAFTED
    length: IndexArray = field(init=False)  # [R]
    cached: IndexArray = field(init=False)  # [R]
    shared: IndexArray = field(init=False)  # [R]
    unseen: IndexArray = field(init=False)  # [R]
    prompt_length: IndexArray = field(init=False)  # [R]
    limit: IndexArray = field(init=False)  # [R] prompt + max_tokens
    counter: npt.NDArray[np.uint64] = field(init=False)  # [R] of the request's noise (engine/noise.py)
    temperature: npt.NDArray[np.float64] = field(init=False)  # [R]
    draw_scale: npt.NDArray[np.float64] = field(init=False)  # [R] 1 / temperature, 0 = greedy
    logprob_scale: npt.NDArray[np.float64] = field(init=False)  # [R] 1 / temperature, 1 where that is 0
    top_k: IndexArray = field(init=False)  # [R]
    top_p: npt.NDArray[np.float64] = field(init=False)  # [R]
    min_p: npt.NDArray[np.float64] = field(init=False)  # [R]
    truncates: BoolArray = field(init=False)  # [R] top-k, top-p or min-p is on
    replays: BoolArray = field(init=False)  # [R] and what that leaves is kept, for the update
    stop_ids: npt.NDArray[np.int32] = field(init=False)  # [R, most stop ids], filled up with NOBODY
    is_request: BoolArray = field(init=False)  # [R] False for prefixes and free rows
    passes: IndexArray = field(init=False)  # [R] in which the request got tokens
    drafted: IndexArray = field(init=False)  # [R] nodes verified
    accepted: IndexArray = field(init=False)  # [R] nodes that became tokens
    prefix_row: IndexArray = field(init=False)  # [R] the prefix's row, or NOBODY
    kept: list[list[IntArray]] = field(init=False)  # [R] the sets of response tokens, of rows that replay
    log_masses: list[list[float]] = field(init=False)  # [R] of these sets
    routes: RouteStore | None = None  # the experts of cached tokens, of a model that has some
    brought: dict[int, RouteArray] = field(default_factory=dict)  # those of a row's tokens before it was computed here
    request: list[RolloutRequest | None] = field(init=False)
    prefix: list[Prefix | None] = field(init=False)
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.num_rows, self.context)
        self.tokens = np.zeros(shape, np.int32)
        self.slots = np.zeros(shape, np.int64)
        self.logprobs = np.zeros(shape, np.float64)
        self.versions = np.zeros(shape, np.int32)
        self.sources = np.zeros(shape, np.int8)
        counts = ("length", "cached", "shared", "unseen", "prompt_length", "limit", "top_k")
        for name in (*counts, "passes", "drafted", "accepted"):
            setattr(self, name, np.zeros(self.num_rows, np.int64))
        for name in ("temperature", "draw_scale", "logprob_scale", "top_p", "min_p"):
            setattr(self, name, np.zeros(self.num_rows, np.float64))
        self.counter = np.zeros(self.num_rows, np.uint64)
        self.truncates = np.zeros(self.num_rows, np.bool_)
        self.replays = np.zeros(self.num_rows, np.bool_)
        self.kept = [[] for _ in range(self.num_rows)]
        self.log_masses = [[] for _ in range(self.num_rows)]
        self.prefix_row = np.full(self.num_rows, NOBODY, np.int64)
        self.stop_ids = np.full((self.num_rows, 1), NOBODY, np.int32)
        self.request = [None] * self.num_rows
        self.prefix = [None] * self.num_rows
        self.is_request = np.zeros(self.num_rows, np.bool_)
        self._free = list(range(self.num_rows))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def enter_prefix(self, tokens: IntArray, request: RolloutRequest | None = None) -> Prefix:
        """Return a row for the shared part of a request's prompt; nothing is cached yet."""
        row = self._free.pop()
        self._bring(row, request)
        self.tokens[row, : len(tokens)] = tokens
        self.length[row] = self.limit[row] = self.prompt_length[row] = len(tokens)
        self.cached[row] = self.shared[row] = 0
        return Prefix(row=row, tokens=tokens.tobytes())

    def enter(self, request: RolloutRequest, prefix: Prefix | None) -> int:
        """Return a row for a request, with its output so far; the prefix's slots are read, not owned."""
        row = self._free.pop()
        self.cached[row] = self.shared[row] = len(request.prompt.token_ids) - 1 if prefix else 0
        self.prefix[row] = prefix
        if prefix:
            prefix.num_readers += 1
            self.prefix_row[row] = prefix.row
        self.go_on(row, request)
        return row

    def go_on(self, row: int, request: RolloutRequest) -> None:
        """Fill the row of a request; what is cached of it stays."""
        prompt, output = request.prompt.token_ids, request.output
        start, end = len(prompt), len(prompt) + (len(output) if output else 0)
        self.tokens[row, :start] = prompt
        self.passes[row] = self.drafted[row] = self.accepted[row] = 0
        self.sources[row, start:] = NOT_DRAFTED
        if output is not None:
            self.tokens[row, start:end] = output.token_ids
            self.logprobs[row, start:end] = output.logprobs
            self.versions[row, start:end] = output.policy_versions
            self.sources[row, start:end] = output.sources if output.sources is not None else DraftSource.UNKNOWN
            self.passes[row], self.drafted[row] = output.num_passes, output.num_drafted
            self.accepted[row] = output.num_accepted
        self.length[row], self.prompt_length[row] = end, start
        self.limit[row] = start + request.sampling.max_tokens
        self._set_sampling(row, request)
        self._bring(row, request)
        noted = output if self.replays[row] else None
        self.kept[row] = noted.kept_sets if noted else []
        self.log_masses[row] = noted.log_masses.tolist() if noted else []
        self.request[row], self.is_request[row] = request, True

    def keep(self, row: IndexArray, sets: Sequence[IntArray], log_masses: FloatArray) -> None:
        """Note what was left to sample from at new tokens of rows that replay."""
        for each, left, log_mass in zip(row.tolist(), sets, log_masses.tolist(), strict=True):
            self.kept[each].append(left)
            self.log_masses[each].append(log_mass)

    def rest(self, row: int) -> None:
        """The row's request has left it; its tokens, keys and values stay."""
        self.request[row], self.is_request[row] = None, False

    def leave(self, row: int) -> None:
        """Free the row and the slots that it owns."""
        self.pool.give(self.owned(row))
        prefix = self.prefix[row]
        if prefix is not None:
            prefix.num_readers -= 1
        self.request[row] = self.prefix[row] = None
        self.brought.pop(row, None)
        self.is_request[row] = False
        self.prefix_row[row] = NOBODY
        self.length[row] = self.cached[row] = self.shared[row] = self.unseen[row] = 0
        self._free.append(row)

    def owned(self, row: int) -> IndexArray:
        """Return the slots that the row owns."""
        return self.slots[row, max(self.shared[row], self.unseen[row]) : self.cached[row]]

    def free_unseen(self, row: IndexArray, reach: int) -> None:
        """Free what no token to come sees, some slots at a time; each sees `reach` positions up to its own."""
        end = self.cached[row] + 1 - reach
        is_due = end >= self.unseen[row] + _FREED_TOGETHER
        for each, last in zip(row[is_due].tolist(), end[is_due].tolist(), strict=True):
            begin = max(self.shared[each], self.unseen[each])
            self.pool.give(self.slots[each, begin : max(begin, last)])
            self.unseen[each] = last

    def contexts_of(self, row: IndexArray) -> list[IntArray]:
        """Return the prompt and response so far of each row, [length], read-only views."""
        tokens = self.tokens.view()
        tokens.flags.writeable = False
        return [tokens[each, :length] for each, length in zip(row.tolist(), self.length[row].tolist(), strict=True)]

    def id(self, row: int) -> str:
        """Return the id of the row's request."""
        request = self.request[row]
        assert request is not None
        return request.id

    def completion(self, row: int, reason: FinishReason) -> Completion:
        """Return the row's answer so far."""
        request = self.request[row]
        assert request is not None
        response = slice(self.prompt_length[row], self.length[row])
        output = Output(
            token_ids=self.tokens[row, response].copy(),
            logprobs=self.logprobs[row, response].copy(),
            policy_versions=self.versions[row, response].copy(),
            finish_reason=reason,
            num_passes=int(self.passes[row]),
            num_drafted=int(self.drafted[row]),
            num_accepted=int(self.accepted[row]),
            sources=self.sources[row, response].copy(),
            kept=KeptSets.of(self.kept[row], self.log_masses[row]) if self.replays[row] else None,
            routes=self._routes_of(row) if self.routes and request.step is not None else None,
        )
        return Completion(request=request, output=output)

    # -- experts -----------------------------------------------------------------------------------------------------

    def _bring(self, row: int, request: RolloutRequest | None) -> None:
        """Experts that have been chosen for a request's tokens are chosen again where these are computed again."""
        self.brought.pop(row, None)
        output = request.output if request is not None else None
        if self.routes and request is not None and output is not None:
            known = output.routes_to(len(output), len(request.prompt.token_ids) + len(output))
            if known is not None:
                self.brought[row] = known

    def _routes_of(self, row: int) -> RouteArray:
        """Return the routes of a row's tokens, [length, layers, k]."""
        assert self.routes is not None
        found, brought = self.routes.blank(int(self.length[row])), self.brought.get(row)
        if brought is not None:
            found[: len(brought)] = brought
        # A row that has entered reads its prefix from the first pass on.
        cached = int(self.cached[row]) if self.cached[row] > self.shared[row] else 0
        found[:cached] = self.routes.at(self.slots[row, :cached])
        return found

    def _set_sampling(self, row: int, request: RolloutRequest) -> None:
        sampling = request.sampling
        for name in ("temperature", "top_k", "top_p", "min_p"):
            getattr(self, name)[row] = getattr(sampling, name)
        self.draw_scale[row] = 1 / sampling.temperature if sampling.temperature else 0.0
        self.logprob_scale[row] = 1 / sampling.temperature if sampling.temperature else 1.0
        self.truncates[row] = sampling.truncates
        self.replays[row] = sampling.truncates and sampling.replay
        self.counter[row] = noise_counters(np.array([request.seed & 0xFFFF_FFFF_FFFF_FFFF], np.uint64))[0]
        self._set_stop_ids(row, sampling.stop_token_ids)

    def _set_stop_ids(self, row: int, stop_ids: Sequence[int]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NOBODY)
        self.stop_ids[row] = NOBODY
        self.stop_ids[row, : len(stop_ids)] = stop_ids

    def check_integrity(self, live: Sequence[int]) -> None:
        """Raise AssertionError unless the `live` rows and the pool account for every slot once."""
        for row in live:
            assert 0 <= self.shared[row] <= self.cached[row] <= self.length[row] <= self.limit[row], f"row {row}"
        self.pool.check_integrity(self.owned(row) for row in live)
