"""The link between SGLang's running batch and a rhymerl drafter.

It calls the same hooks, in the same order, as our own engine does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rhymerl.backends.remote.counters import Counters
from rhymerl.backends.remote.drafter_feed import FeedReader
from rhymerl.backends.remote.wire import feed_of, from_custom_params, noise_of, without_logprobs
from rhymerl.backends.sglang.plugin.arrays import TreeArrays, lay_out
from rhymerl.budgets.fixed import FixedBudget
from rhymerl.drafters.base import Drafter
from rhymerl.engine.protocol import DraftingProtocol
from rhymerl.engine.tree import no_drafts
from rhymerl.errors import BackendError
from rhymerl.history import NO_VERSION, HistoryDelta
from rhymerl.types import Completion, DraftBatch, FinishReason, RolloutRequest, SamplingParams

if TYPE_CHECKING:
    from rhymerl.types import IntArray


_log = logging.getLogger(__name__)
_ALL_TOKENS = 2**30  # SGLang's top-k that is off
_NOTHING_NEW = HistoryDelta(version=NO_VERSION, is_snapshot=False, changes=())


class EngineRequest(Protocol):
    """The part of SGLang's `Req` that is read here."""

    rid: str
    origin_input_ids: Sequence[int]  # the prompt, and what was generated before it came here
    output_ids: Sequence[int]
    sampling_params: Any

    def finished(self) -> bool:
        """Return whether its answer has ended."""


@dataclass(slots=True)
class _Row:
    """A request and its tokens so far, in one buffer that is only ever appended to."""

    engine_request: EngineRequest
    request: RolloutRequest
    tokens: IntArray  # [capacity] also what the engine draws behind the end of the answer
    visible: IntArray  # [capacity] the same memory, read-only
    stops: Set[int]
    given: int  # tokens that came with the request
    limit: int  # of tokens, these included
    end: int  # of what is in `tokens`
    length: int  # of the prompt and what belongs to the answer
    num_told: int  # tokens that the drafter's `accept` has heard of
    last: int  # of the tokens up to `end`
    num_output: int = 0  # of the engine's output_ids, how many are in `tokens`
    has_stopped: bool = False  # the answer has its stop token

    @classmethod
    def of(cls, engine_request: EngineRequest, num_nodes: int) -> _Row:
        given, params = engine_request.origin_input_ids, engine_request.sampling_params
        sampling = _sampling(params, noise_of(params.custom_params, engine_request.rid)[1])
        request = from_custom_params(params.custom_params, engine_request.rid, given, sampling)
        length, limit = len(given), len(given) + int(params.max_new_tokens)
        tokens = np.empty(limit + 2 * num_nodes + 1, np.int32)
        tokens[:length] = given
        visible = tokens.view()
        visible.flags.writeable = False
        stops = frozenset(sampling.stop_token_ids)
        return cls(engine_request, request, tokens, visible, stops, length, limit, length, length, length, given[-1])

    def follow(self, ahead: Sequence[int]) -> None:
        """Take up what the engine has committed, and behind it the tokens `ahead` that it will commit next.

        In both there may be more than belongs to the answer: what follows a stop token, or the last token that is wanted.
        """
        start, committed = self.given + self.num_output, self.engine_request.output_ids[self.num_output :]
        new = [*committed, *ahead]
        self.num_output += len(committed)
        self.end = start + len(new)
        if new:
            self.tokens[start : self.end] = new
        self.last = new[-1] if new else int(self.tokens[self.end - 1])
        if self.has_stopped and self.length <= start:
            return
        self.length, self.has_stopped = min(self.end, self.limit), False
        if not self.stops.isdisjoint(new):
            stop = next(index for index, token in enumerate(new, start + 1) if token in self.stops)
            if stop <= self.limit:
                self.length, self.has_stopped = stop, True

    @property
    def context(self) -> IntArray:
        return self.visible[: self.length]

    @property
    def num_generated(self) -> int:
        return self.length - len(self.request.prompt.token_ids)

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return 0 if self.has_stopped else self.limit - self.length

    def completion(self) -> Completion:
        answer = self.tokens[len(self.request.prompt.token_ids) : self.length]
        reason = "stop" if self.has_stopped else "length" if self.room <= 0 else _reason(self.engine_request)
        return Completion(request=self.request, output=replace(without_logprobs(answer), finish_reason=reason))


def _sampling(params: Any, offset: int) -> SamplingParams:
    """A request's parameters, from SGLang's own: greedy is top-k 1 there, all tokens a huge top-k, and what came before is not counted.

    With `ignore_eos` it ignores all stop tokens.
    """
    stops = () if params.ignore_eos else tuple(sorted(params.stop_token_ids or ()))
    return SamplingParams(
        max_tokens=max(offset + int(params.max_new_tokens), 1),
        temperature=0.0 if params.top_k == 1 else params.temperature,
        top_k=params.top_k if 1 < params.top_k < _ALL_TOKENS else 0,
        top_p=params.top_p,
        min_p=params.min_p,
        stop_token_ids=stops,
    )


class EngineDrafting:
    """Drafts by the protocol for SGLang's running batch: trees of n nodes a request, its last token among them."""

    def __init__(
        self,
        drafter: Drafter,
        n: int,
        *,
        vocabulary: int,
        feed: FeedReader | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.protocol = DraftingProtocol(drafter, FixedBudget(n - 1), vocabulary=vocabulary)
        self.n = n
        self._feed = feed
        self._counters = counters
        self._rows: dict[int, _Row] = {}  # by the identity of the engine's request: names come again

    def propose(self, requests: Sequence[EngineRequest], ahead: Sequence[Sequence[int]]) -> TreeArrays:
        """Return the trees of the batch; `ahead` are each request's sampled tokens that its `output_ids` lack yet."""
        started = time.perf_counter()
        here = {id(request) for request in requests}
        self._finish_departed(here)
        rows = [self._row(request, here) for request in requests]
        for row, tokens in zip(rows, ahead, strict=True):
            row.follow(tokens)
            self._tell(row)
        drafts = self._drafts(rows)
        roots = np.array([row.last for row in rows], np.int64)
        arrays = lay_out(drafts, roots, self.n)
        self._count(asks=len(rows), hits=int((drafts.counts > 0).sum()), drafted_nodes=len(drafts.token_ids))
        self._count(passes=1, draft_s=time.perf_counter() - started)
        return arrays

    def catch_up(self) -> None:
        """The pass of the trees is launched."""
        self.protocol.catch_up()

    def _row(self, engine_request: EngineRequest, here: Set[int]) -> _Row:
        row = self._rows.get(id(engine_request))
        if row is None:
            row = _Row.of(engine_request, self.n)
            row.request = self._named_apart(row.request, here)
            self._rows[id(engine_request)] = row
            if self._feed is not None:
                self._catch_up(self._feed, feed_of(engine_request.sampling_params.custom_params))
            self.protocol.start(row.request)
        return row

    def _catch_up(self, feed: FeedReader, version: int) -> None:
        """Read the feed as far as there is something.

        Drafts from what is known are good for any request, whatever its client has written.
        """
        try:
            feed.catch_up(version)
        except BackendError as error:
            _log.error("rhymerl: %s; drafts come from what is known until then", error)

    def _named_apart(self, request: RolloutRequest, here: Set[int]) -> RolloutRequest:
        """The request by a name that no other row has, since drafters know requests by their names: two trainers may give the same one.

        A namesake that is not in the batch was put back into the queue. It is finished: it was taken away there before this one was sent,
        or else starts anew when it is back.
        """
        rows = {row.request.id: key for key, row in self._rows.items()}
        name = request.id
        while (namesake := rows.get(name)) in here:
            name += "'"
        if namesake is not None:
            self._finish(namesake)
        return request if name == request.id else replace(request, id=name)

    def _tell(self, row: _Row) -> None:
        """`accept` of what the pass before has sampled: all but its last token came from the draft."""
        new = row.length - row.num_told
        if new > 0 and self.protocol.hears_tokens:
            drafted = row.end - row.num_told - 1
            self.protocol.accept(row.request, row.tokens[row.num_told : row.length], min(drafted, new))
        row.num_told = row.length

    def _drafts(self, rows: Sequence[_Row]) -> DraftBatch:
        room = np.array([row.room for row in rows], np.int32)
        askers = np.flatnonzero(room > 1)
        if self.protocol.max_nodes == 0 or len(askers) == 0:
            return no_drafts(len(rows))
        asking = [rows[i] for i in askers.tolist()]
        requests, before = [row.request for row in asking], self.protocol.num_malformed
        generated = np.array([row.num_generated for row in asking], np.int64)
        limits = self.protocol.limits(requests, generated, num_waiting=0)  # fixed: nothing depends on it
        drafts = self.protocol.propose(requests, [row.context for row in asking], limits, room[askers])
        self._count(bad_drafts=self.protocol.num_malformed - before)
        return drafts.spread(askers, len(rows))

    def flush(self) -> None:
        """Nothing is in the engine any more: whoever was put back into the queue and taken away there is gone too.

        New weights are coming. Where no trainer tells of its history, a step is over: the drafter hears that nothing is new in it.
        """
        for key in list(self._rows):
            self._finish(key)
        if self._feed is None or self._feed.version == 0:
            self.protocol.follow(_NOTHING_NEW)

    def _finish_departed(self, here: Set[int]) -> None:
        """Finish the requests that have left the batch and have ended; others were only put back into the queue."""
        for key in [key for key, row in self._rows.items() if key not in here and row.engine_request.finished()]:
            self._finish(key)

    def _finish(self, key: int) -> None:
        row = self._rows.pop(key)
        row.follow(())
        self._tell(row)
        self.protocol.finish(row.completion())

    def _count(self, **amounts: float) -> None:
        if self._counters is not None:
            self._counters.add(**amounts)


def not_yet_known(
    requests: Sequence[EngineRequest], cached: Sequence[int], sampled: Callable[[], Sequence[Sequence[int]]]
) -> Sequence[Sequence[int]]:
    """Return the tokens that the last pass has sampled for each request and that are not in its output yet.

    Results are read a pass later. `cached` tokens of each request have keys and values: all but its last one. `sampled`
    is only called when some are missing.
    """
    missing = [
        length + 1 - len(request.origin_input_ids) - len(request.output_ids)
        for request, length in zip(requests, cached, strict=True)
    ]
    if not any(missing):
        return [()] * len(missing)
    return [line[:count] for line, count in zip(sampled(), missing, strict=True)]


def _reason(engine_request: EngineRequest) -> FinishReason:
    reason = getattr(engine_request, "finished_reason", None)
    kind = str(reason.to_json()["type"]) if reason is not None else "abort"
    return "stop" if kind == "stop" else "length" if kind == "length" else "withdrawn"
