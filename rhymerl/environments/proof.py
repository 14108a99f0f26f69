"""Proof, before a run, that a chat template only appends: tokens kept turn by turn equal one rendering of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rhymerl.environments.encoding import ANSWER, Boundary, Messages, ReplyEncoder, base_conversation
from rhymerl.errors import ConfigError, DataError

_LOCATION = "environment"
_OPENING: Messages = [{"role": "user", "content": "Is it so?"}]
_THOUGHT = "<think>\nWhy?\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn of a made episode."""

    answer: Mapping[str, Any]
    reply: Messages
    is_cut: bool = False

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        return [self.answer, *self.reply]


def prove(encoder: ReplyEncoder, roles: Sequence[str], *, rerenders: bool = False) -> str | None:
    """Return what made episodes would lose or gain by rendering them anew; None where the template only appends.

    Called once at the start, on the CPU. `roles` are those of the environment's replies, such as "user" or "tool". If a
    run `rerenders`, it begins another part there. Raises ConfigError where the template cannot carry a reply of such a
    role at all, or not behind what the policy has said.
    """
    for role in roles if encoder.chat.tokenizer.chat_template else ():
        thinks = encoder.chat.render(_OPENING, _LOCATION).rstrip().endswith("<think>")
        episodes = _episodes(role, thought=_THOUGHT if thinks else "")
        if role == "tool" and _rendered(encoder, [*_OPENING, *_messages(episodes["three turns"])]) is None:
            if rerenders:
                raise ConfigError(
                    "rollout.history='rerender': the tokenizer's chat template takes a tool's result only behind a call that it writes "
                    "itself; expected keep"
                )
            episodes = {title: [_calling(turn) for turn in turns] for title, turns in episodes.items()}
        for title, turns in episodes.items():
            try:
                difference = _difference(encoder, turns)
            except DataError as error:
                raise ConfigError(
                    f"{error}; expected a model (model.path) whose template takes replies of the role {role!r}"
                ) from error
            if difference is not None:
                done = "another part of an episode begins" if rerenders else "an episode's tokens stay as they are,"
                return f"{done} where one rendering of the whole has others ({title}: {difference})"
    return None


def _difference(encoder: ReplyEncoder, turns: Sequence[_Turn]) -> str | None:
    """Say where an episode's tokens, kept by turn, differ from one rendering. Raises DataError for an invalid reply."""
    text = encoder.chat.render(_OPENING, _LOCATION)
    kept = encoder.chat.token_ids(text, _LOCATION)
    for number, turn in enumerate(turns):
        boundary = encoder.boundary(turn.reply, _LOCATION)
        ended_by = None if turn.is_cut else boundary.ended_by
        appended, token_ids = encoder.appended(turn.reply, boundary, ended_by=ended_by, location=_LOCATION)
        before = [*_OPENING, *_messages(turns[:number])]
        said = _written(encoder, text, before, turn, boundary) + encoder.text_of(ended_by)
        sampled = encoder.chat.token_ids(text + said, _LOCATION)
        if not np.array_equal(sampled[: len(kept)], kept):  # the answer would change tokens in front of it
            sampled = np.concatenate([kept, encoder.chat.token_ids(said, _LOCATION)])
        kept = np.concatenate([sampled, token_ids])
        text += said + appended
    shown = _rendered(encoder, [*_OPENING, *_messages(turns)])
    if shown is None:
        return "it refuses the whole"
    whole = encoder.chat.token_ids(shown, _LOCATION)
    if np.array_equal(kept, whole):
        return None
    length = min(len(kept), len(whole))
    first = int(np.argmax(np.append(kept[:length] != whole[:length], True)))
    ours, theirs = (encoder.chat.tokenizer.decode(each[first : first + 12]) for each in (kept, whole))
    return f"other tokens for the same text, from {ours!r}" if text == shown else f"{theirs!r} in place of {ours!r}"


def _written(encoder: ReplyEncoder, text: str, before: Messages, turn: _Turn, boundary: Boundary) -> str:
    """The answer as the template writes it, without the end of the turn: `<think>` and the like may stand in front."""
    content: str = ANSWER if "tool_calls" in turn.answer else turn.answer["content"]
    if "thinking" in turn.answer:  # templates may show it in the last turn only
        shown = _rendered(encoder, [*before, turn.answer], add_generation_prompt=False)
    else:
        shown = _rendered(encoder, [*before, *turn.messages])
    # The generation prompt may have written the first part of the answer.
    start = -1 if shown is None or not shown.startswith(text) else shown.find(content, len(text) - len(content))
    if shown is None or start < 0:
        return content
    start += len(content)
    end = start if turn.is_cut else shown.find(boundary.end_text, start)
    return shown[len(text) : max(start, end)]


def _rendered(encoder: ReplyEncoder, messages: Messages, *, add_generation_prompt: bool = True) -> str | None:
    try:
        return encoder.chat.render(messages, _LOCATION, add_generation_prompt=add_generation_prompt)
    except DataError:
        return None


def _messages(turns: Sequence[_Turn]) -> list[Mapping[str, Any]]:
    return [message for turn in turns for message in turn.messages]


def _calling(turn: _Turn) -> _Turn:
    """The turn with a call of a tool in place of words."""
    return replace(turn, answer=base_conversation(turn.reply, calls_tools=True)[-1], is_cut=False)


def _episodes(role: str, *, thought: str) -> dict[str, list[_Turn]]:
    """Made episodes, by what is particular about them."""

    def reply(content: str = "Is it so?") -> dict[str, str]:
        called = {"name": "tool", "tool_call_id": "call00000"} if role == "tool" else {}
        return {"role": role, "content": content, **called}

    def turn(content: str, *replies: dict[str, str], is_cut: bool = False, **fields: str) -> _Turn:
        return _Turn({"role": "assistant", "content": thought + content, **fields}, replies or (reply(),), is_cut)

    replies_in_a_row = (reply("4"), reply("No.\n")) if role == "tool" else ()
    return {
        "one turn": [turn("Yes.")],
        "three turns": [turn("Yes."), turn("No.", *replies_in_a_row), turn("Yes.")],
        "an empty answer": [turn(""), turn("Yes.")],
        "an answer cut by length": [turn("Yes, and", is_cut=True), turn("No.")],
        "unicode": [turn("Ja, müde 你好 🙂", reply("ß\u200d🙂\n\n你")), turn("é")],
        "thinking in an earlier turn": [turn(f"{'' if thought else _THOUGHT}Yes."), turn("No.")],
        "thinking beside an answer": [turn("Yes.", thinking="Why?", reasoning_content="Why?"), turn("No.")],
    }
