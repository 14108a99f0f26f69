"""The episodes of a run: what is asked of an environment when a turn has ended, and how its reply joins the answer.

An episode is one request that goes on. Whatever is needed to go on is in its `Output`, so an episode can be withdrawn,
moved to another worker, kept in a checkpoint and taken up again at any moment: an environment is a function of the
transcript.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rhymerl.drafts import NOT_DRAFTED
from rhymerl.environments.base import Reply, Turn
from rhymerl.environments.pool import EnvironmentPool, Replied
from rhymerl.errors import DataError
from rhymerl.types import FinishReason, Output, Prompt, RolloutRequest, TurnEnd

_LOG = logging.getLogger(__name__)
_NOTHING = np.empty(0, np.int32)

if TYPE_CHECKING:
    from rhymerl.environments.encoding import ReplyEncoder
    from rhymerl.types import IntArray


class _EndedTurn(NamedTuple):
    """A turn whose environment has been asked."""

    request: RolloutRequest
    output: Output
    text: str  # of the turn


@dataclass(eq=False)
class Episodes:
    """Asks an environment what it replies to turns that have ended, and appends it. One thread uses it."""

    pool: EnvironmentPool
    encoder: ReplyEncoder
    _: KW_ONLY
    decode: Callable[[IntArray], str]  # gives the text of a turn
    context_tokens: int  # of the model
    max_turns: int | None = None
    max_turn_tokens: int | None = None
    rerenders: bool = False
    lockstep: bool = False  # all replies are waited for, even where there is something to decode
    _warned: set[FinishReason] = field(init=False, default_factory=set)
    _waiting: dict[str, _EndedTurn] = field(init=False, default_factory=dict)  # by request id

    def close(self) -> None:
        """End the environment's processes; may be called twice."""
        self.pool.close()

    @property
    def num_waiting(self) -> int:
        """Return how many episodes wait: their environment has been asked and has not replied."""
        return len(self._waiting)

    def next_turn(self, request: RolloutRequest) -> RolloutRequest:
        """Return the request of one more turn; it ends at the nearest limit of turn, episode and context.

        What an engine knows of an episode in parts is the last one.
        """
        output, part = request.output or Output.of(), of_last_segment(request)
        begin, brings = output.turns[-1].stop if output.turns else 0, len(part.output or ())
        left = min(
            request.sampling.max_tokens - output.num_sampled,
            self.context_tokens - len(part.prompt.token_ids) - brings,
            (self.max_turn_tokens or request.sampling.max_tokens) - (len(output) - begin),
        )
        return replace(part, sampling=replace(request.sampling, max_tokens=brings + left), may_go_on=True)

    def after_turn(self, request: RolloutRequest, output: Output) -> Output:
        """Return the engine's output as part of the episode: where the engine stopped, only a turn has ended."""
        if output.finish_reason == "stop":
            return replace(output, finish_reason="turn")
        if output.finish_reason != "length":
            return output
        end = TurnEnd(start=len(output), stop=len(output), text=self._last_text(request, output))
        reason: FinishReason = "length" if self._room(request, output) else "context"
        return replace(output, turns=(*output.turns, end), finish_reason=reason)

    def ask(self, request: RolloutRequest, output: Output) -> None:
        """Ask the environment what it replies to the last turn."""
        ended = self._waiting[request.id] = _EndedTurn(request, output, self._last_text(request, output))
        row = {"prompt": request.prompt.text, **request.prompt.columns}
        said = [Turn(text=turn.text, reply=turn.reply) for turn in output.turns]
        self.pool.ask(request.id, row, [*said, Turn(text=ended.text)])

    def forget(self, names: Iterable[str]) -> None:
        """These requests are over, or go on elsewhere: nobody waits for replies to them, and their sessions end."""
        for name in names:
            self._waiting.pop(name, None)
            self.pool.forget(name)

    def replied(self, timeout_s: float | None) -> list[tuple[str, Output]]:
        """Return the answers with a reply, appended or finished; wait at most `timeout_s` for the first.

        In lockstep all replies are waited for, so that nothing follows the clock.
        """
        replied = self.pool.replied(timeout_s)
        while self.lockstep and len(replied) < len(self._waiting):
            replied += self.pool.replied(None)
        if self.lockstep:
            replied.sort(key=lambda each: each.episode)
        return [(each.episode, self._behind(self._waiting.pop(each.episode), each)) for each in replied]

    def _behind(self, ended: _EndedTurn, replied: Replied) -> Output:
        """Return the answer with an environment's reply behind its last turn, or as it has ended."""
        request, output, text = ended
        reply, failure, tokens, said = replied.reply or Reply(), replied.failure, _NOTHING, None
        reason = self._ending(request, output, replied.reply)
        if reason == "withdrawn":
            try:
                tokens, said = self._tokens_of(reply, request, output, text)
            except DataError as error:
                reason, failure = "environment", str(error).removeprefix(f"{self._location(request)}: ")
            else:
                if len(tokens) >= (self._room(request, output) if said is None else self.context_tokens):
                    what = "its reply" if said is None else "the conversation with its reply"
                    room = f"no room for a turn in the model's context of {self.context_tokens}"
                    failure = f"{what} of {len(tokens)} tokens leaves {room}"
                    reason, tokens, said = "context", _NOTHING, None
        if failure:
            self._warn(request, reason, failure)
        turn = TurnEnd(
            start=len(output),
            stop=len(output) + len(tokens),
            text=text,
            reply=reply.content if reason == "withdrawn" else None,
            reward=reply.reward,
            metrics=reply.metrics,
            waited_s=replied.waited_s,
            replied_at=replied.replied_at,
            saved_s=replied.saved_s,
            rerendered=said,
        )
        return replace(output + _unsampled(output, tokens), turns=(*output.turns, turn), finish_reason=reason)

    def _tokens_of(
        self, reply: Reply, request: RolloutRequest, output: Output, text: str
    ) -> tuple[IntArray, int | None]:
        """Return what follows the turn; where another part begins, also how many of its tokens have been said before.

        Raises DataError for a reply that the tokenizer or its chat template cannot carry.
        """
        is_chat, location = request.prompt.is_chat, self._location(request)
        if is_chat and self.rerenders:
            last = TurnEnd(start=len(output), stop=len(output), text=text, reply=reply.content)
            return self._rendered(replace(output, turns=(*output.turns, last)), request.prompt, location)
        ended_by = int(output.token_ids[-1])
        return self.encoder.encode(reply.content, is_chat=is_chat, ended_by=ended_by, location=location)[1], None

    def _rendered(self, output: Output, prompt: Prompt, location: str) -> tuple[IntArray, int | None]:
        """Return what the template appends to the last part, or its rendering of the whole, which begins another."""
        messages, appended = [*prompt.messages], _NOTHING
        for turn in output.turns:
            ended_by = int(output.token_ids[turn.start - 1])
            shown, appended = self.encoder.encode(turn.reply, is_chat=True, ended_by=ended_by, location=location)
            messages += [self.encoder.answer(turn.text, shown, location), *shown]
        whole = self.encoder.rendered(messages, location)
        part = output.segments(prompt.token_ids)[-1]
        known = np.concatenate([part.prompt, part.token_ids])
        if np.array_equal(whole[: len(known)], known):
            return whole[len(known) :], None
        return whole, max(len(whole) - len(appended), 0)

    @staticmethod
    def _location(request: RolloutRequest) -> str:
        return request.prompt.location or request.id

    def _ending(self, request: RolloutRequest, output: Output, reply: Reply | None) -> FinishReason:
        """Return how an answer has ended after a turn, `withdrawn` if it goes on behind the reply."""
        if reply is None:
            return "environment"
        if reply.is_end:
            return "stop"
        if self.max_turns is not None and len(output.turns) + 1 >= self.max_turns:
            return "max_turns"
        return "length" if output.num_sampled >= request.sampling.max_tokens else "withdrawn"

    def _warn(self, request: RolloutRequest, reason: FinishReason, failure: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            _LOG.warning(
                "environment: episode %s (%s) ends early: %s (more are only counted, as episodes/%s_frac)",
                request.id,
                request.prompt.location,
                failure,
                reason,
            )

    def _room(self, request: RolloutRequest, output: Output) -> int:
        """Return how many tokens the model's context has left."""
        return self.context_tokens - len(output.segments(request.prompt.token_ids)[-1])

    def _last_text(self, request: RolloutRequest, output: Output) -> str:
        """Return what the policy has said since the last reply, without the token that ends it."""
        start, end = output.turns[-1].stop if output.turns else 0, len(output)
        has_stop = end > start and int(output.token_ids[end - 1]) in request.sampling.stop_token_ids
        return self.decode(output.token_ids[start : end - has_stop])


def of_last_segment(request: RolloutRequest) -> RolloutRequest:
    """Return the request of the segment that goes on: its prompt and its noise are its own, and follow from these."""
    if request.output is None:
        return request
    *before, last = request.output.segments(request.prompt.token_ids)
    if not before:
        return request
    ended, rest = request.output[: last.start], request.output[last.start :]
    turns = tuple(turn.shifted(-last.start) for turn in request.output.turns if turn.start >= last.start)
    known = request.prefetched
    agrees = known is not None and np.array_equal(known[: len(ended)], ended.token_ids)
    return replace(
        request,
        prompt=replace(request.prompt, token_ids=last.prompt),
        seed=int.from_bytes(blake2b(f"{request.seed}/{len(before)}".encode(), digest_size=8).digest(), "little"),
        output=replace(rest, turns=turns),
        prefetched=known[len(ended) :] if known is not None and agrees else None,
        segment=len(before),
    )


def _unsampled(output: Output, tokens: IntArray) -> Output:
    """Return tokens that go behind an answer, though nobody has sampled them."""
    sources = None if output.sources is None else np.full(len(tokens), NOT_DRAFTED, np.int8)
    return replace(Output.of(tokens, policy_version=int(output.policy_versions[-1])), sources=sources)
