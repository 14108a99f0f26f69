"""Requests on their way through an engine: sent by threads, back as completions."""

from __future__ import annotations

import math
import queue
import resource
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np

from rhymerl.backends.remote.answers import EngineAnswer
from rhymerl.backends.remote.client import Client, NoAnswerError
from rhymerl.backends.remote.wire import to_custom_params
from rhymerl.errors import BackendError, ConfigError
from rhymerl.types import Completion, FinishReason, Output, RolloutRequest

_OTHER_FILES = 512  # that a process may have open besides
_FIRST_PIECE = 32  # tokens
_LEAST_PIECE = 8
LOOK_S = 0.2  # how often to see whether the engine is alive while nothing comes back
_HEALTH_S = 60.0  # for a health check, which is a token; SGLang itself gives up after 20
_ABORT_S = 5.0


@dataclass(slots=True)
class InFlightRequest:
    """A request that was sent to an engine, with its `output` at that time."""

    request: RolloutRequest
    rid: str  # the engine's name for it: of one length, because an engine aborts whatever begins with a name
    answer: Future[Sequence[EngineAnswer]] = field(default_factory=Future)  # in one piece or several
    pieces: list[EngineAnswer] = field(default_factory=list)  # there are, while more are to come
    is_given_up: bool = False  # no more are

    @property
    def failure(self) -> BaseException | None:
        """Return why the engine could not be asked or refused the request; None in flight and after success."""
        return self.answer.exception() if self.answer.done() and not self.answer.cancelled() else None


@dataclass(eq=False)
class InFlightRequests:
    """The requests in flight through an engine, at most `max_sent` with it at a time; the others wait here.

    `nodes` returns the mean number of draft nodes per request and pass, None if there are none. Tokens below
    `num_tokens` are sampled. With `piece_s` answers are requested in pieces that take about so long; waiting requests
    do not get between the pieces. `check` raises NoAnswerError when the engine has died; it hears if it looks so.
    Raises ConfigError when so many connections cannot be open.
    """

    engine: Client
    _: KW_ONLY
    num_tokens: int
    nodes: Callable[[], float] | None
    max_sent: int
    silence_timeout_s: float
    check: Callable[[bool], None]
    piece_s: float | None = None

    def __post_init__(self) -> None:
        _make_room_for(self.max_sent)
        self.engine = self.engine.another()  # which is hung up at the end
        self.threads = ThreadPoolExecutor(self.max_sent, thread_name_prefix="rhymerl-engine")
        self._piece_tokens = _FIRST_PIECE
        self.policy_version = 0
        self.feed = 0  # what the drafter has to have read before it drafts
        self._back: queue.Queue[InFlightRequest] = queue.Queue()
        self._totals: Counter[str] = Counter()
        self.requests: dict[str, InFlightRequest] = {}  # by the request's id
        self._name = uuid.uuid4().hex[:12]  # other trainers may use the same engine
        self._sent = 0
        self._heard_s = time.monotonic()

    def send(self, request: RolloutRequest) -> None:
        """Send it to the engine, from where its output ends."""
        if not self.requests:
            self._heard_s = time.monotonic()
        sent = InFlightRequest(request, f"{self._name}-{self._sent:012d}")
        self._sent += 1
        self.requests[request.id] = sent
        sent.answer = self.threads.submit(self._ask, sent)
        sent.answer.add_done_callback(lambda _: self._back.put(sent))

    def _ask(self, sent: InFlightRequest) -> Sequence[EngineAnswer]:
        """Return the engine's answer; in one of the threads."""
        while True:
            started, request = time.monotonic(), self._so_far(sent).resume() if sent.pieces else sent.request
            left = request.sampling.max_tokens - (len(request.output) if request.output is not None else 0)
            asked = left if self.piece_s is None else min(left, self._piece_tokens)
            said = self.engine.post("/generate", self._content(sent.rid, request, asked), timeout_s=math.inf)
            of_whom = f"the SGLang engine at {self.engine.url}, request {request.id}"
            answer = EngineAnswer.of(said, of_whom=of_whom, most=asked, vocabulary=self.num_tokens)
            if asked == left or sent.is_given_up or not _goes_on(answer, request):
                return [*sent.pieces, answer]
            sent.pieces.append(answer)
            assert self.piece_s is not None
            speed = asked / max(time.monotonic() - started, 1e-3)
            self._piece_tokens = max(round(speed * self.piece_s), _LEAST_PIECE)

    def _so_far(self, sent: InFlightRequest) -> Completion:
        return _completion(sent, self._output(sent, list(sent.pieces), "withdrawn"))

    def outputs(self) -> list[Completion]:
        """Return the tokens so far of requests that have pieces of an answer; they go on."""
        return [self._so_far(sent) for sent in self.requests.values() if sent.pieces]

    def complete(self, sent: InFlightRequest, *, is_withdrawn: bool = False) -> Completion:
        """Return the completion of an answered request. Raises BackendError if the engine failed it or gave it up."""
        del self.requests[sent.request.id]
        if sent.answer.cancelled():
            return _completion(sent, Output.of())
        answers = sent.answer.result()
        last = answers[-1]
        if last.reason == "abort" and not is_withdrawn:
            raise BackendError(f"the SGLang engine gave up request {sent.request.id}: {last.told}")
        reason = "withdrawn" if sent.is_given_up else _REASONS.get(last.reason, "withdrawn")
        new = self._output(sent, answers, reason)
        self._check_version(sent, last.version, len(new))
        self._totals.update(emitted=len(new), passes=new.num_passes, drafted=new.num_drafted, accepted=new.num_accepted)
        return _ended(_completion(sent, new), last.told)

    def _check_version(self, sent: InFlightRequest, version: str | None, num_tokens: int) -> None:
        """Raise BackendError if the engine was restarted behind its address, or got another trainer's weights."""
        if num_tokens and version != str(self.policy_version):
            raise BackendError(
                f"the SGLang engine at {self.engine.url} answered request {sent.request.id} with weights of version {version}, "
                f"expected {self.policy_version}: it was started anew, or somebody else gives it weights"
            )

    def complete_all(self, requests: Sequence[InFlightRequest], completed: list[Completion]) -> None:
        """Append the completions of requests still in flight to `completed`, even if one of them raises."""
        errors = []
        for sent in filter(self.has, requests):
            try:
                completed.append(self.complete(sent))
            except BackendError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def abandon(self, sent: InFlightRequest) -> Completion:
        """Return the completion of a request whose engine is gone: its answer if it has come, else its pieces."""
        if sent.answer.done() and sent.failure is None:
            return self.complete(sent, is_withdrawn=True)
        del self.requests[sent.request.id]
        return self._so_far(sent)

    def wait(self, timeout_s: float) -> list[InFlightRequest]:
        """Wait for an answer, at most so long; return the requests that have one, unless completed otherwise."""
        back = []
        with suppress(queue.Empty):
            back.append(self._back.get(timeout=timeout_s))
            while True:
                back.append(self._back.get_nowait())
        return [sent for sent in back if self.has(sent)]

    def has(self, sent: InFlightRequest) -> bool:
        """Return whether the request has not been completed yet; it may have been sent again."""
        return self.requests.get(sent.request.id) is sent

    def look(self, back: Sequence[InFlightRequest]) -> None:
        """Raise NoAnswerError when the engine is dead, or has been silent for long and is not well.

        `back` are the requests that have just come back.
        """
        failures = [sent.failure for sent in back if sent.failure is not None]
        if back:
            self._heard_s = time.monotonic()
        if failures or not back:
            self.check(bool(failures))
        for failure in failures:
            if isinstance(failure, NoAnswerError):
                raise failure
        if time.monotonic() - self._heard_s < self.silence_timeout_s:
            return
        try:
            self.engine.get("/health_generate", timeout_s=_HEALTH_S)
        except BackendError as error:
            what = "no answer has come for so long, and an SGLang engine fails its health check"
            raise self._silence(f"{what} ({error})") from error
        self._heard_s = time.monotonic()

    def _silence(self, what: str) -> NoAnswerError:
        return NoAnswerError(f"backend.silence_timeout_s={self.silence_timeout_s:g}: {what}")

    def give_up(self, requests: Sequence[InFlightRequest], patience_s: float) -> None:
        """Return when all of them are back. Raises BackendError when one has failed, or stays away for too long."""
        for sent in requests:
            sent.is_given_up = True
            sent.answer.cancel()
        deadline = time.monotonic() + patience_s
        while left := [sent for sent in requests if not sent.answer.done()]:
            # Again and again: what is on its way to the engine is not known there yet.
            for sent in left:
                if time.monotonic() > deadline:
                    raise self._silence("an SGLang engine has not given requests back for so long")
                with suppress(BackendError):  # whether it is gone is seen by its answers
                    self.engine.post("/abort_request", {"rid": sent.rid}, timeout_s=_ABORT_S)
            wait([sent.answer for sent in left], LOOK_S)
            self.check(False)
        for sent in requests:
            if sent.failure is not None:
                raise sent.failure

    def totals(self) -> Counter[str]:
        """Return tokens and passes of the requests completed since the last call."""
        totals, self._totals = self._totals, Counter()
        return totals

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.engine.hang_up()

    def _content(self, rid: str, request: RolloutRequest, max_tokens: int) -> dict[str, Any]:
        sampling = request.sampling
        answer = request.output.token_ids if request.output is not None else np.empty(0, np.int32)
        return {
            "rid": rid,
            "input_ids": [*request.prompt.token_ids.tolist(), *answer.tolist()],
            "return_logprob": True,
            "logprob_start_len": -1,
            "sampling_params": {
                "max_new_tokens": max_tokens,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k or -1,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "stop_token_ids": list(sampling.stop_token_ids),
                "custom_params": to_custom_params(request, feed=self.feed, num_tokens=self.num_tokens),
            },
        }

    def _output(self, sent: InFlightRequest, answers: Sequence[EngineAnswer], reason: FinishReason) -> Output:
        """Return what the engine has sampled since the request was sent."""
        nothing = Output.of()
        token_ids = np.concatenate([nothing.token_ids, *(answer.token_ids for answer in answers)])
        logprobs = np.concatenate([nothing.logprobs, *(answer.logprobs for answer in answers)])
        if not np.isfinite(logprobs).all():
            raise BackendError(
                f"the SGLang engine's log-probs of request {sent.request.id} are not finite (policy version "
                f"{self.policy_version}): the policy's weights have probably diverged"
            )
        verified = sum(answer.num_verified for answer in answers)
        passes = len(token_ids) if self.nodes is None else len(answers) + verified
        accepted = max(len(token_ids) - passes, 0)
        drafted = 0.0 if self.nodes is None else verified * self.nodes()
        return Output(
            token_ids=token_ids,
            logprobs=logprobs,
            policy_versions=np.full(len(token_ids), self.policy_version, np.int32),
            finish_reason=reason,
            num_passes=min(passes, len(token_ids)),
            num_drafted=max(round(drafted), accepted),  # by the mean of all requests
            num_accepted=accepted,
        )


def _goes_on(answer: EngineAnswer, request: RolloutRequest) -> bool:
    stops = set(answer.token_ids.tolist()).intersection(request.sampling.stop_token_ids)
    return answer.reason == "length" and not stops


_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}


def _make_room_for(num_connections: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"backend.max_running: needs {needed} open files for its connections, and this process may have {hard} (ulimit -Hn)"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _completion(sent: InFlightRequest, new: Output) -> Completion:
    """Return the whole output of a request: what it was sent with, and the `new` tokens."""
    before = sent.request.output
    return Completion(request=sent.request, output=new if before is None else before + new)


def _ended(completion: Completion, told: Mapping[str, Any]) -> Completion:
    """Cut the answer where it ends: of what one pass samples, engines look at the limit before a stop token.

    A request that was told to give up may have come to neither. Raises BackendError for one that was cut short of both.
    """
    sampling, output = completion.request.sampling, completion.output
    start = len(completion.request.output or ())  # turns before have stop tokens of their own
    stops = start + np.flatnonzero(np.isin(output.token_ids[start:], sampling.stop_token_ids))[:1] + 1
    end = min([*stops.tolist(), sampling.max_tokens])
    if len(output) < end and output.is_finished:
        raise BackendError(
            f"the SGLang engine ended request {completion.request.id} after {len(output)} of {sampling.max_tokens} tokens "
            f"({told}): it has stop tokens of its own, or its context or its memory for keys and values is too small "
            "(backend.arguments.max_total_tokens, mem_fraction_static)"
        )
    if len(output) < end:
        return completion
    return replace(completion, output=replace(output[:end], finish_reason="stop" if end in stops else "length"))
