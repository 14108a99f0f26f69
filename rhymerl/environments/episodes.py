"""The episodes of a run: what is asked of an environment when a turn has ended, and how its reply joins the answer.

An episode is one request that goes on. Whatever is needed to go on is in its `Output`, so an episode can be withdrawn,
moved to another worker, kept in a checkpoint and taken up again at any moment: an environment is a function of the
transcript.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rhymerl.drafts import NOT_DRAFTED
from rhymerl.environments.base import Reply, Turn
from rhymerl.environments.memory import RememberingPool
from rhymerl.environments.pool import EnvironmentPool, Replied
from rhymerl.errors import DataError
from rhymerl.types import FinishReason, Output, RolloutRequest, TurnEnd

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


class Episodes:
    """Asks an environment what it replies to turns that have ended, and appends it.

    `decode` gives the text of a turn; `context_tokens` are the model's. One thread uses it.
    """

    def __init__(
        self,
        pool: EnvironmentPool | RememberingPool,
        encoder: ReplyEncoder,
        *,
        decode: Callable[[IntArray], str],
        context_tokens: int,
        max_turns: int | None = None,
        max_turn_tokens: int | None = None,
        lockstep: bool = False,
    ) -> None:
        self._pool = pool
        self._encoder = encoder
        self._max_turns = max_turns
        self._max_turn_tokens = max_turn_tokens
        self.lockstep = lockstep  # all replies are waited for, even where there is something to decode
        self._warned: set[FinishReason] = set()
        self._decode = decode
        self._context_tokens = context_tokens
        self._waiting: dict[str, _EndedTurn] = {}  # by request id

    def close(self) -> None:
        """End the environment's processes; may be called twice."""
        self._pool.close()

    @property
    def num_waiting(self) -> int:
        """Return how many episodes wait: their environment has been asked and has not replied."""
        return len(self._waiting)

    def next_turn(self, request: RolloutRequest) -> RolloutRequest:
        """Return the request of one more turn; it ends at the nearest limit of turn, episode and context."""
        output = request.output or Output.of()
        begin = output.turns[-1].stop if output.turns else 0
        left = min(
            request.sampling.max_tokens - output.num_sampled,
            self._context_tokens - len(request.prompt.token_ids) - len(output),
            (self._max_turn_tokens or request.sampling.max_tokens) - (len(output) - begin),
        )
        return replace(request, sampling=replace(request.sampling, max_tokens=len(output) + left), may_go_on=True)

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
        self._pool.ask(request.id, row, [*said, Turn(text=ended.text)])

    def forget(self, names: Iterable[str]) -> None:
        """These requests are over, or go on elsewhere: nobody waits for replies to them, and their sessions end."""
        for name in names:
            self._waiting.pop(name, None)
            self._pool.forget(name)

    def replied(self, timeout_s: float | None) -> list[tuple[str, Output]]:
        """Return the answers with a reply, appended or finished; wait at most `timeout_s` for the first.

        In lockstep all replies are waited for, so that nothing follows the clock.
        """
        replied = self._pool.replied(timeout_s)
        while self.lockstep and len(replied) < len(self._waiting):
            replied += self._pool.replied(None)
        if self.lockstep:
            replied.sort(key=lambda each: each.episode)
        return [(each.episode, self._behind(self._waiting.pop(each.episode), each)) for each in replied]

    def _behind(self, ended: _EndedTurn, replied: Replied) -> Output:
        """Return the answer with an environment's reply behind its last turn, or as it has ended."""
        request, output, text = ended
        reply, failure, tokens = replied.reply or Reply(), replied.failure, _NOTHING
        reason = self._ending(request, output, replied.reply)
        if reason == "withdrawn":
            try:
                tokens = self._tokens_of(reply, request, output)
            except DataError as error:
                reason, failure = "environment", str(error).removeprefix(f"{self._location(request)}: ")
            else:
                if len(tokens) >= self._room(request, output):
                    reason, tokens, failure = "context", _NOTHING, self._too_long(tokens)
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
        )
        return replace(output + _unsampled(output, tokens), turns=(*output.turns, turn), finish_reason=reason)

    def _tokens_of(self, reply: Reply, request: RolloutRequest, output: Output) -> IntArray:
        """Raises DataError for a reply that the tokenizer or its chat template cannot carry."""
        return self._encoder.encode(
            reply.content,
            is_chat=request.prompt.is_chat,
            ended_by=int(output.token_ids[-1]),
            location=self._location(request),
        )

    def _too_long(self, tokens: IntArray) -> str:
        return f"its reply of {len(tokens)} tokens leaves no room for a turn in the model's context of {self._context_tokens}"

    @staticmethod
    def _location(request: RolloutRequest) -> str:
        return request.prompt.location or request.id

    def _ending(self, request: RolloutRequest, output: Output, reply: Reply | None) -> FinishReason:
        """Return how an answer has ended after a turn, `withdrawn` if it goes on behind the reply."""
        if reply is None:
            return "environment"
        if reply.is_end:
            return "stop"
        if self._max_turns is not None and len(output.turns) + 1 >= self._max_turns:
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
        return self._context_tokens - len(request.prompt.token_ids) - len(output)

    def _last_text(self, request: RolloutRequest, output: Output) -> str:
        """Return what the policy has said since the last reply, without the token that ends it."""
        start, end = output.turns[-1].stop if output.turns else 0, len(output)
        has_stop = end > start and int(output.token_ids[end - 1]) in request.sampling.stop_token_ids
        return self._decode(output.token_ids[start : end - has_stop])


def _unsampled(output: Output, tokens: IntArray) -> Output:
    """Return tokens that go behind an answer, though nobody has sampled them."""
    sources = None if output.sources is None else np.full(len(tokens), NOT_DRAFTED, np.int8)
    return replace(Output.of(tokens, policy_version=int(output.policy_versions[-1])), sources=sources)
