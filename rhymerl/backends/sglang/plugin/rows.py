"""The requests of SGLang's running batch, as a drafter is told of them: each with its tokens so far, in one buffer."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from rhymerl.backends.remote.wire import from_custom_params, noise_of, without_logprobs
from rhymerl.types import Completion, FinishReason, IntArray, RolloutRequest, SamplingParams

_ALL_TOKENS = 2**30  # SGLang's top-k that is off


class EngineRequest(Protocol):
    """The part of SGLang's `Req` that is read here."""

    rid: str
    origin_input_ids: Sequence[int]  # the prompt, and what was generated before it came here
    output_ids: Sequence[int]
    sampling_params: Any

    def finished(self) -> bool:
        """Return whether its answer has ended."""


@dataclass(slots=True)
class EngineRow:
    """A request and its tokens so far, in one buffer that is only ever appended to."""

    engine_request: EngineRequest
    request: RolloutRequest
    tokens: IntArray  # [capacity] also what the engine draws behind the end of the answer
    visible: IntArray  # [capacity] the same memory, read-only
    stops: Set[int]
    num_prompt: int  # tokens
    given: int  # tokens that came with the request
    limit: int  # of tokens, these included
    last: int  # of the tokens up to `end`
    end: int = field(init=False)  # of what is in `tokens`
    length: int = field(init=False)  # of the prompt and what belongs to the answer
    num_told: int = field(init=False)  # tokens that the drafter's `accept` has heard of
    num_output: int = 0  # of the engine's output_ids, how many are in `tokens`
    has_stopped: bool = False  # the answer has its stop token
    num_passes: int = 1  # that the drafter has not heard of; the first one read the prompt

    def __post_init__(self) -> None:
        self.end = self.length = self.num_told = self.given

    @classmethod
    def of(cls, engine_request: EngineRequest, num_nodes: int) -> EngineRow:
        """Return the row of a new request, with room for trees behind its end."""
        given, params = engine_request.origin_input_ids, engine_request.sampling_params
        sampling = _sampling(params, noise_of(params.custom_params, engine_request.rid)[1])
        request = from_custom_params(params.custom_params, engine_request.rid, given, sampling)
        length, limit = len(given), len(given) + int(params.max_new_tokens)
        tokens = np.empty(limit + 2 * num_nodes + 1, np.int32)
        tokens[:length] = given
        visible = tokens.view()
        visible.flags.writeable = False
        stops = frozenset(sampling.stop_token_ids)
        num_prompt = len(request.prompt.token_ids)
        return cls(engine_request, request, tokens, visible, stops, num_prompt, length, limit, given[-1])

    def follow(self, ahead: Sequence[int]) -> None:
        """Take up what the engine has committed, and behind it the tokens `ahead` that it will commit next.

        In both there may be more than belongs to the answer: what follows a stop token, or the last token that is
        wanted.
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
        """Return the prompt and the answer so far, read-only."""
        return self.visible[: self.length]

    @property
    def num_generated(self) -> int:
        return self.length - self.num_prompt

    @property
    def room(self) -> int:
        return 0 if self.has_stopped else self.limit - self.length

    def completion(self) -> Completion:
        answer = self.tokens[self.num_prompt : self.length]
        reason = "stop" if self.has_stopped else "length" if self.room <= 0 else _reason(self.engine_request)
        return Completion(request=self.request, output=replace(without_logprobs(answer), finish_reason=reason))


def _sampling(params: Any, offset: int) -> SamplingParams:
    """Return a request's parameters from SGLang's own.

    There, greedy is top-k 1, all tokens are a huge top-k, and earlier tokens are not counted. With `ignore_eos` it
    ignores all stop tokens.
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


def _reason(engine_request: EngineRequest) -> FinishReason:
    reason = getattr(engine_request, "finished_reason", None)
    kind = str(reason.to_json()["type"]) if reason is not None else "abort"
    return "stop" if kind == "stop" else "length" if kind == "length" else "withdrawn"
