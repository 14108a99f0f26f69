"""Tool calls in what the policy says, read as JSON or text and never evaluated.

    ToolCall(name="add", arguments={"a": 1, "b": 2})

Each family of chat templates writes them in its own way. Reading takes time in proportion to the text, whatever stands
in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeAlias, get_args

Family = Literal["hermes", "qwen_coder", "llama", "mistral", "gpt_oss"]
FAMILIES: tuple[Family, ...] = get_args(Family)
#: A family, or a response template of transformers.
CallFormat: TypeAlias = Family | Mapping[str, Any]

# What the source of a family's chat templates has. The first family that fits counts.
_MARKS: Mapping[Family, tuple[str, ...]] = {
    "gpt_oss": ("<|channel|>", "<|message|>", "functions"),
    "qwen_coder": ("<function=", "<parameter="),
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "llama": ("<|start_header_id|>", "parameters"),
}
_FOREIGN = ("<arg_key>",)  # GLM writes these within <tool_call>
_MAX_WORDS = 300  # characters of an error
_MAX_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, or what was meant as one: then `error` says what is wrong with it, in one line for the model.

    `id` is empty where the family writes none.
    """

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str = ""


def family_of(template: str) -> Family | None:
    """Return the family in whose way the source of a chat template writes tool calls; None when it is none of them."""
    if any(mark in template for mark in _FOREIGN):
        return None
    return next((family for family, marks in _MARKS.items() if all(mark in template for mark in marks)), None)


def read_calls(text: str, call_format: CallFormat) -> list[ToolCall]:
    """Return the calls in one turn's text, in order. What stands in thoughts (`<think>…</think>`) is no call."""
    if isinstance(call_format, Mapping):
        return _by_response_template(text, call_format)
    return _without_thoughts(text, _xml(text) if call_format == "qwen_coder" else _json(text, _SYNTAX[call_format]))


def _without_thoughts(text: str, found: Iterator[ToolCall | None]) -> list[ToolCall]:
    """None is the end of the thoughts: what came before is no call, even if it looks like one."""
    calls: list[ToolCall] = []
    is_thinking = text.lstrip().startswith(("<think>", "[THINK]"))
    for call in found:
        if call is None:
            calls, is_thinking = [], False
        else:
            calls.append(call)
    return [] if is_thinking else calls


_END_OF_THOUGHTS = r"(?P<thoughts></think>|\[/THINK\])"


class _Syntax:
    """A family that writes JSON: the text before a call, perhaps with its name and id, and the text after it."""

    def __init__(self, opening: str, end: str, *, end_in_words: str) -> None:
        self.opening = re.compile(f"{opening}|{_END_OF_THOUGHTS}")
        self.end = re.compile(rf"\s*(?:{end}|\Z)")
        self.end_in_words = end_in_words


_NAME = r"(?P<name>[\w.-]{1,64})"
_LLAMA_CALL = r'(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:)'
_SYNTAX: Mapping[str, _Syntax] = {
    "hermes": _Syntax(r"<tool_call>", r"</tool_call>", end_in_words="</tool_call>"),
    "llama": _Syntax(
        rf"<\|python_tag\|>|\A\s*{_LLAMA_CALL}|;\s{{0,9}}{_LLAMA_CALL}",
        r"(?=;|<\|)",
        end_in_words="the end of the turn, or ; and another call",
    ),
    "mistral": _Syntax(
        rf"\[TOOL_CALLS\](?:\s{{0,9}}{_NAME}(?:\[CALL_ID\](?P<id>\w{{1,64}}))?(?:\[ARGS\]|(?=\{{)))?",
        r"(?=\[TOOL_CALLS\])",
        end_in_words="the end of the turn, or another [TOOL_CALLS]",
    ),
    "gpt_oss": _Syntax(
        rf"to=functions\.{_NAME}\s?(?:<\|channel\|>\w{{1,20}})?\s?(?:<\|constrain\|>)?\w{{0,20}}\s?<\|message\|>",
        r"<\|(?:call|end|start)\|>",
        end_in_words="<|call|>",
    ),
}


def _json(text: str, syntax: _Syntax) -> Iterator[ToolCall | None]:
    """What lies within a call's JSON, such as a tag in one of its strings, opens no other call."""
    text = _Text(text)
    position = 0
    while (opening := syntax.opening.search(text, position)) is not None:
        start, position = opening.end(), max(opening.end(), opening.start() + 1)
        if opening["thoughts"]:
            yield None
            continue
        name, id = (opening.groupdict().get(group) or "" for group in ("name", "id"))
        try:
            value, end = _DECODER.raw_decode(text, _SPACE.match(text, start).end())  # type: ignore[union-attr]
        except (ValueError, RecursionError) as error:
            yield ToolCall(name=name, id=id, error=f"the call is no JSON: {_words(error, start)}")
            continue
        if syntax.end.match(text, end) is None:
            yield ToolCall(
                name=name, id=id, error=f"the call is malformed: expected {syntax.end_in_words} after its JSON"
            )
            continue
        position = end
        if name:
            yield _call(value, name=name, id=id)
        else:
            yield from (_of_object(item) for item in (value if isinstance(value, list) else [value]))


class _Text(str):
    """Text whose JSON errors count no lines, which takes time in proportion to all that stands before each of them."""

    def count(self, *where: object) -> int:
        return 0

    def rfind(self, *where: object) -> int:
        return -1


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)  # strings may have plain line breaks
_SPACE = re.compile(r"\s*")


def _of_object(value: Any) -> ToolCall:
    """`{"name": "add", "arguments": {"a": 1}}`; Llama calls them parameters."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARACTERS:
        return ToolCall(error='the call is malformed: expected {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    id = value.get("id")
    return _call(arguments, name=name, id=id if isinstance(id, str) and len(id) <= _MAX_NAME_CHARACTERS else "")


def _call(arguments: Any, *, name: str, id: str = "") -> ToolCall:
    if isinstance(arguments, str):  # JSON in JSON, as OpenAI's interface has it
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(name=name, id=id, error=f"the arguments of {name} are no JSON: {_words(error)}")
    if not isinstance(arguments, dict):
        return ToolCall(name=name, id=id, error=f"the arguments of {name} are no JSON object")
    return ToolCall(name=name, arguments=arguments, id=id)


# Names may hold no `<`: one that never ends is given up where the next tag begins.
_TAG = re.compile(
    rf"<function=(?P<function>[^<>\n]{{1,64}})>|<parameter=(?P<parameter>[^<>\n]{{1,64}})>|</parameter>|</function>|{_END_OF_THOUGHTS}"
)


def _xml(text: str) -> Iterator[ToolCall | None]:
    """Yield `<function=add><parameter=a>\n1\n</parameter></function>`; all values are text, ended by `</parameter>`."""
    name = parameter = ""
    begin = 0
    arguments: dict[str, str] = {}
    for tag in _TAG.finditer(text):
        if parameter:
            if tag[0] == "</parameter>":
                arguments[parameter] = text[begin : tag.start()].removeprefix("\n").removesuffix("\n")
                parameter = ""
        elif tag["thoughts"]:
            yield None
            name = ""
        elif tag["function"]:
            if name:
                yield _unended(name)
            name, arguments = tag["function"].strip(), {}
        elif tag["parameter"]:
            parameter, begin = tag["parameter"].strip() if name else "", tag.end()
        elif tag[0] == "</function>" and name:
            yield ToolCall(name=name, arguments=arguments)
            name = ""
    if name:
        yield _unended(name, parameter)


def _unended(name: str, parameter: str = "") -> ToolCall:
    where = f"parameter {parameter} has no </parameter>" if parameter else "it has no </function>"
    return ToolCall(name=name, error=f"the call of {name} is malformed: {where}")


def _by_response_template(text: str, template: Mapping[str, Any]) -> list[ToolCall]:
    from transformers.utils.chat_parsing import parse_response

    try:
        message = parse_response(text, dict(template), prefix="")
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # how it says that a text does not fit
        return [ToolCall(error=f"the call is malformed: {_words(error)}")]
    found = message.get("tool_calls") or []
    calls = found if isinstance(found, list) else [found]
    return [_of_object(call.get("function", call) if isinstance(call, dict) else call) for call in calls]


def _words(error: BaseException, start: int = 0) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (character {error.pos - start})"
    return str(error).strip().partition("\n")[0][:_MAX_WORDS]
