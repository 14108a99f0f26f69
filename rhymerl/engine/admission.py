"""Admission of requests in order of arrival, with preemption of the youngest, and the tokens each row feeds a pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rhymerl.engine.prefixes import PrefixTable
from rhymerl.engine.rows import Rows
from rhymerl.types import Completion, FinishReason, IndexArray, IntArray, Output, RolloutRequest


class Fed(NamedTuple):
    """What a pass feeds. F = rows."""

    row: IndexArray  # [F]
    chain: IndexArray  # [F] how many of its uncached tokens
    emits: IndexArray  # which of the F are requests that feed their last token
    num_tokens: int


class KeptRows:
    """Rows that wait for their environment, by request id, until they resume, are forgotten, or lose their room."""

    def __init__(self, rows: Rows, prefixes: PrefixTable) -> None:
        self._rows = rows
        self._prefixes = prefixes
        self._row_of: dict[str, int] = {}  # the one that has waited longest first

    @property
    def held(self) -> list[int]:
        """The rows."""
        return list(self._row_of.values())

    @property
    def num_slots(self) -> int:
        """The slots that could be had from them."""
        return sum(len(self._rows.owned(row)) for row in self._row_of.values())

    def keep(self, row: int) -> None:
        """The request in this row has left it, and may go on."""
        name = self._rows.id(row)
        self._rows.rest(row)
        self._row_of[name] = row

    def take(self, request: RolloutRequest) -> int | None:
        """Return the row in which a request goes on, None where it has none; it is kept no more."""
        row = self._row_of.pop(request.id, None)
        if row is not None and not self._begins(request, self._rows.tokens[row, : self._rows.length[row]]):
            self._prefixes.leave(row)  # another request of that name
            return None
        return row

    def forget(self, name: str) -> None:
        """A request does not go on."""
        if name in self._row_of:
            self._prefixes.leave(self._row_of.pop(name))

    def evict(self) -> bool:
        """Free the row that has waited longest; returns whether there was one."""
        name = next(iter(self._row_of), None)
        if name is not None:
            self.forget(name)
        return name is not None

    def clear(self) -> None:
        """Free all of them."""
        while self.evict():
            pass

    @staticmethod
    def _begins(request: RolloutRequest, tokens: IntArray) -> bool:
        prompt, output = request.prompt.token_ids, request.output
        own = prompt if output is None else np.concatenate([prompt, output.token_ids])
        return len(own) > len(tokens) and np.array_equal(own[: len(tokens)], tokens)


class Admission:
    """Admits waiting requests while there are rows and slots; without slots it requeues the youngest.

    At most `max_running` requests run side by side, and a pass has at most `max_pass_tokens` tokens.
    """

    def __init__(self, rows: Rows, *, max_running: int, max_pass_tokens: int) -> None:
        self.running: list[int] = []  # rows, the oldest first
        self.num_preemptions = 0
        self.prefixes = PrefixTable(rows)
        self.kept = KeptRows(rows, self.prefixes)
        self._rows = rows
        self._max_running = max_running
        self._max_pass_tokens = max_pass_tokens
        self._waiting: deque[RolloutRequest] = deque()
        self._started: set[str] = set()  # ids of requests that have entered at least once and not ended

    @property
    def has_work(self) -> bool:
        """Return whether a request is waiting or running."""
        return bool(self._waiting or self.running)

    @property
    def num_waiting(self) -> int:
        """Return the requests without a row; 0 while one of an earlier step runs, since none waits for it."""
        if not self._waiting:
            return 0
        first, running = self._waiting[0].step, (self._rows.request[row] for row in self.running)
        is_ahead = first is not None and any(each and each.step is not None and each.step < first for each in running)
        return 0 if is_ahead else len(self._waiting)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests."""
        self._waiting.extend(requests)

    def progress(self) -> dict[str, int]:
        """Return the response tokens so far of all requests by id, the running ones first, oldest first."""
        rows, running = self._rows, self.running
        done = (rows.length[running] - rows.prompt_length[running]).tolist()
        brought = {request.id: len(request.output) if request.output else 0 for request in self._waiting}
        return {rows.id(row): tokens for row, tokens in zip(running, done, strict=True)} | brought

    # -- before a pass -----------------------------------------------------------------------------------------------

    def admit(self) -> list[RolloutRequest]:
        """Admit requests while there is room for their tokens and one token a row; return the new ones."""
        new = []
        while self._waiting and len(self.running) < self._max_running:
            request = self._waiting[0]
            brings = len(request.prompt.token_ids) + (len(request.output) if request.output else 0)
            if self.running and brings + len(self.running) > self._room():
                break
            self._waiting.popleft()
            self.running.append(self._enter(request))
            if request.id not in self._started:
                self._started.add(request.id)
                new.append(request)
        return new

    def _enter(self, request: RolloutRequest) -> int:
        row = self.kept.take(request)
        if row is not None:
            self._rows.go_on(row, request)
            return row
        while self._rows.num_free < 2 and self.kept.evict():
            pass
        return self._rows.enter(request, self.prefixes.acquire(request))

    def _room(self) -> int:
        """Return how many slots could be had without preempting anybody, less what admitted rows still have to feed."""
        idle = self.prefixes.idle_slots() + self.kept.num_slots
        return self._rows.pool.num_free + idle - self.prefixes.owed(self.running)

    def feed(self) -> Fed:
        """Return what the next pass feeds, after making room for it."""
        while (fed := self._fed()).num_tokens > self._rows.pool.num_free:
            self._make_room()
        return fed

    def _fed(self) -> Fed:
        """Prefixes come first, then the requests that they serve."""
        rows = self._rows
        running = np.array(self.running, np.int64)
        uncomputed = self.prefixes.uncomputed()
        if not uncomputed and (rows.length[running] - rows.cached[running] == 1).all():
            return Fed(running, np.ones(len(running), np.int64), np.arange(len(running)), len(running))
        budget = max(self._max_pass_tokens - len(self.running), 1)
        feeding, chains, emits, unready = list[int](), list[int](), list[int](), set[int]()
        for row in [*uncomputed, *self.running]:
            owed = int(rows.length[row] - rows.cached[row])
            prefix = rows.prefix[row]
            if prefix is not None and prefix.row in unready:
                continue
            count = owed if owed == 1 else min(owed, budget)
            budget -= count if owed > 1 else 0
            if count < owed:
                unready.add(row)
            elif rows.is_request[row]:
                emits.append(len(feeding))
            if count:
                feeding.append(row)
                chains.append(count)
        fed, chain, emitting = (np.array(each, np.int64) for each in (feeding, chains, emits))
        return Fed(fed, chain, emitting, sum(chains))

    def _make_room(self) -> None:
        if self.prefixes.evict_idle() or self.kept.evict():
            return
        assert len(self.running) > 1, "a request was admitted that cannot fit"
        self._preempt(self.running[-1])
        self.num_preemptions += 1

    def preempt_all(self) -> None:
        """Forget all keys and values; running requests go on from their tokens."""
        for row in reversed(self.running.copy()):
            self._preempt(row)
        self.kept.clear()
        self.prefixes.clear()

    def _preempt(self, row: int) -> None:
        """Put the request back at the head of the queue; its tokens stay, its keys and values are computed again."""
        request = self._rows.completion(row, "withdrawn").resume()
        self._leave(row)
        self._waiting.appendleft(request)

    # -- after a pass ------------------------------------------------------------------------------------------------

    def finish(self, row: int, reason: FinishReason) -> Completion:
        """Take a running request out for good."""
        completion = self._rows.completion(row, reason)
        if reason == "stop" and completion.request.may_go_on:
            self.running.remove(row)
            self.kept.keep(row)
        else:
            self._leave(row)
        self._started.discard(completion.request.id)
        return completion

    def _leave(self, row: int) -> None:
        self.running.remove(row)
        self.prefixes.leave(row)

    def withdraw(self, ids: Iterable[str] | None) -> tuple[list[Completion], list[Completion]]:
        """Remove requests, the oldest first, None = all; return those that have entered and those that never have."""
        wanted = None if ids is None else set(ids)
        running = [row for row in self.running if wanted is None or self._rows.id(row) in wanted]
        started, fresh = [self.finish(row, "withdrawn") for row in running], []
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if wanted is not None and request.id not in wanted:
                self._waiting.append(request)
            elif request.id in self._started:
                self._started.discard(request.id)
                started.append(_as_it_came(request))
            else:
                fresh.append(_as_it_came(request))
        return started, fresh

    def check_integrity(self) -> None:
        """Raise AssertionError unless every KV slot is free or owned by exactly one live row."""
        self._rows.check_integrity([*self.running, *self.kept.held, *self.prefixes.held])


def _as_it_came(request: RolloutRequest) -> Completion:
    return Completion(request=request, output=request.output or Output.of())
