"""Encode what an environment replies: the tokens between the policy's sampled end of turn and its next token."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhymerl.errors import DataError, require_at_least
from rhymerl.models.chat import ChatTokenizer, check_messages
from rhymerl.types import IntArray

Messages = Sequence[Mapping[str, Any]]
CUT_MARK = " [... cut]"  # behind a reply's text where rollout.max_reply_tokens has cut it
_CHARACTERS_PER_TOKEN = 16  # at most, of a reply that may have to be cut
# Words that no template writes itself: they tell where it puts the contents of messages.
_QUESTION, ANSWER, _REPLY = "rhymerlquestion", "rhymerlanswer", "rhymerlreply"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """How a template goes on behind the policy's turn, before replies of certain roles."""

    calls_tools: bool = False  # it takes these replies only behind a turn that calls a tool
    end_id: int | None  # the token that ends the turn; None where the template writes none
    end_text: str
    begins_reply: bool = False  # the same token is the first one of the reply, as in GLM
    ended_by: int | None  # what the policy samples there, as far as is known
    lead: str = ""  # what the template writes between its generation prompt and the words of the turn
    closing: str = ""  # and between these and its end


class ReplyEncoder:
    """Turns a reply into the tokens that a chat template, or plain text, appends to what stands there.

    The difference rule: a short conversation that ends with an assistant's turn is rendered with the reply behind it,
    and the text behind that turn's end token is taken. Nothing that has been sampled is encoded again, and a system
    message that the template writes by itself stays in front. `chat` is what renders the prompts. `stop_token_ids` are
    the policy's; the tokenizer's EOS is always one of them.

    A reply of more than `max_reply_tokens` is cut to so many, scaffold included: its longest texts end with `CUT_MARK`,
    where the tokenizer knows it, and the boundary and the generation prompt stay whole. Raises ValueError for
    `max_reply_tokens` below 1.
    """

    def __init__(
        self, chat: ChatTokenizer, *, stop_token_ids: Sequence[int] = (), max_reply_tokens: int | None = None
    ) -> None:
        if max_reply_tokens is not None:
            require_at_least({"max_reply_tokens": (max_reply_tokens, 1)})
        self.max_reply_tokens = max_reply_tokens
        self.chat = chat
        self._added = chat.tokenizer.added_tokens_decoder  # by id
        self._eos_id: int | None = chat.tokenizer.eos_token_id
        self._stop_ids = {self._eos_id, *stop_token_ids}
        self._boundaries: dict[tuple[str, ...], Boundary] = {}  # by the roles of the reply's messages
        self._mark = CUT_MARK
        try:
            self.chat.check_known(CUT_MARK, self.chat.token_ids(CUT_MARK, ""), "")
        except DataError:
            self._mark = ""

    def encode(
        self,
        reply: object,
        *,
        is_chat: bool,
        ended_by: int | None = None,
        is_cut: bool = False,
        location: str = "environment",
    ) -> tuple[str | Messages, IntArray]:
        """Return a reply as the policy gets it, cut if it is too long, and the tokens that are appended, int32 [R].

        The reply is a string or chat messages. `is_chat` says that the prompt was chat messages; a string is then one
        message of the user. `ended_by` is the stop token that was sampled, by default the template's own; a turn that
        `is_cut` ended with none, so the reply begins with the template's. Raises DataError that begins with `location`,
        such as the prompt's.
        """
        where = f"{location}: the reply"
        content = self._checked(reply, where, is_chat=is_chat)
        boundary = self.boundary(content, location)
        if ended_by is None and not is_cut:
            ended_by = boundary.ended_by

        def encoded(num_characters: int | None) -> tuple[str | Messages, IntArray]:
            """The tokens where each text has at most so many characters in front of the mark."""
            shortened = content if num_characters is None else self._shortened(content, num_characters)
            text, token_ids = self.appended(shortened, boundary, ended_by=ended_by, location=location)
            self.chat.check_known(text, token_ids, where)
            return shortened, token_ids

        limit = self.max_reply_tokens
        longest = None if limit is None else _CHARACTERS_PER_TOKEN * limit
        found = encoded(longest)
        if limit is None or longest is None or len(found[1]) <= limit:
            return found
        num_fitting = bisect_right(range(longest), limit, key=lambda length: len(encoded(length)[1]))
        if not num_fitting:
            raise DataError(
                f"{where} has {len(encoded(0)[1])} tokens with all of its text cut, more than rollout.max_reply_tokens={limit}"
            )
        return encoded(num_fitting - 1)

    def answer(self, text: str, reply: str | Messages, location: str) -> dict[str, str]:
        """Return the message of a turn that this reply follows: its text without what the template writes itself."""
        boundary = self.boundary(reply, location)
        return {"role": "assistant", "content": text.removeprefix(boundary.lead).removesuffix(boundary.closing)}

    def rendered(self, messages: Messages, location: str) -> IntArray:
        """Return the tokens of a whole conversation in front of the policy's next turn."""
        return self.chat.token_ids(self.chat.render(messages, location), location)

    def _checked(self, reply: object, where: str, *, is_chat: bool) -> str | Messages:
        if isinstance(reply, str):
            if not reply:
                raise DataError(f"{where} is empty; expected a string or a list of chat messages {{role, content}}")
            if not is_chat:
                return reply
            reply = [{"role": "user", "content": reply}]
        messages = check_messages(reply, where)
        self.chat.check_template(where, instead="string replies")
        if not is_chat:
            raise DataError(f"{where} is chat messages, but the prompt is plain text; expected a string")
        for number, message in enumerate(messages, start=1):
            if message["role"] == "assistant":
                raise DataError(
                    f"{where}, message {number}: the role 'assistant' is the policy's; expected another one"
                )
        return messages

    def boundary(self, content: str | Messages, location: str) -> Boundary:
        """Return where such a reply begins. Raises DataError unless the template appends its messages in order."""
        if isinstance(content, str):
            return Boundary(end_id=self._eos_id, end_text=self.text_of(self._eos_id), ended_by=self._eos_id)
        roles = tuple(message["role"] for message in content)
        if roles not in self._boundaries:
            try:
                self._boundaries[roles] = self._find_boundary(content, location, calls_tools=False)
            except DataError as refusal:  # perhaps because the policy has called no tool
                if "tool" not in roles:
                    raise
                try:
                    self._boundaries[roles] = self._find_boundary(content, location, calls_tools=True)
                except DataError:
                    raise refusal from None
        return self._boundaries[roles]

    def appended(
        self, content: str | Messages, boundary: Boundary, *, ended_by: int | None, location: str
    ) -> tuple[str, IntArray]:
        """Return the text behind the policy's turn, which `ended_by` has ended, or nothing yet; and its tokens."""
        text = content if isinstance(content, str) else self._rendered(content, boundary, ended_by, location)
        # The token in front may take white space away, and shows that this is not the beginning of a text.
        before = self._eos_id if ended_by is None else ended_by
        if front := self.text_of(before):
            token_ids = self.chat.token_ids(front + text, f"{location}: the reply")
            if token_ids[0] == before:
                return text, token_ids[1:]
        return text, self.chat.token_ids(text, f"{location}: the reply")

    def _rendered(self, messages: Messages, boundary: Boundary, ended_by: int | None, location: str) -> str:
        text = self.chat.render([*base_conversation(messages, calls_tools=boundary.calls_tools), *messages], location)
        start = text.index(ANSWER) + len(ANSWER)
        end = text.index(boundary.end_text, start)
        if ended_by is None or (boundary.begins_reply and ended_by != boundary.end_id):
            return text[end if boundary.calls_tools else start :]
        return text[end + len(boundary.end_text) :]

    def _find_boundary(self, messages: Messages, location: str, *, calls_tools: bool) -> Boundary:
        marked = [{**message, "content": f"{_REPLY}{number}"} for number, message in enumerate(messages, start=1)]
        text = self.chat.render([*base_conversation(messages, calls_tools=calls_tools), *marked], location)
        start = place = text.find(ANSWER)
        for number, message in enumerate(marked, start=1):
            place = text.find(message["content"], place) if place >= 0 else place
            if place < 0:
                raise DataError(
                    f"{location}: the tokenizer's chat template does not append message {number} of the reply, of the role "
                    f"{message['role']!r}"
                )
        between = text[start + len(ANSWER) : text.find(_REPLY, start)]
        found = [token for token in self.chat.token_ids(between, location).tolist() if self.text_of(token).strip()]
        stops = [token for token in found if token in self._stop_ids]
        special = [token for token in found if self._added[token].special] or found
        end_id = next(iter([*stops, *special]), None)
        if calls_tools and end_id is None:
            raise DataError(
                f"{location}: the tokenizer's chat template writes no special token behind a call of a tool"
            )
        opening = self.chat.render(base_conversation(messages, calls_tools=calls_tools)[:1], location)
        begins_reply = special == [end_id] and end_id != self._eos_id
        is_sampled = end_id is not None and (end_id in self._stop_ids or not begins_reply)
        return Boundary(
            calls_tools=calls_tools,
            end_id=end_id,
            end_text=self.text_of(end_id),
            begins_reply=begins_reply,
            ended_by=end_id if is_sampled else self._eos_id,
            lead=text[len(opening) : start] if text.startswith(opening) else "",
            closing=between.partition(self.text_of(end_id))[0] if self.text_of(end_id) else "",
        )

    def text_of(self, token_id: int | None) -> str:
        """Return an added token's text; nothing for other tokens."""
        token = None if token_id is None else self._added.get(token_id)
        return "" if token is None else str(token.content)

    def _shortened(self, content: str | Messages, num_characters: int) -> str | Messages:
        if not isinstance(content, str):
            return [{**each, "content": self._shortened(each["content"], num_characters)} for each in content]
        is_short = len(content) <= num_characters + len(self._mark)
        return content if is_short else content[:num_characters] + self._mark


def base_conversation(replies: Messages, *, calls_tools: bool) -> list[dict[str, Any]]:
    """Return a short conversation in front of a reply. The word that stands for the policy's answer is near its end."""
    question = {"role": "user", "content": _QUESTION}
    if not calls_tools:
        return [question, {"role": "assistant", "content": ANSWER}]
    tool = next(message for message in replies if message["role"] == "tool")
    function = {"name": tool.get("name", "tool"), "arguments": {"text": ANSWER}}
    call = {"type": "function", "id": tool.get("tool_call_id", "call00000"), "function": function}
    return [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
