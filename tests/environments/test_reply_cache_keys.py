"""What the reply of tools follows from: equal calls share one, whatever else has been said, and nobody can tell."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from rhymerl.environments import Tools, Turn, answer, calculator, pure
from rhymerl.environments.base import checked_reply
from rhymerl.environments.reply_cache import key_of
from rhymerl.errors import HookError
from rhymerl.tasks import RunningSum
from tests.environments.test_calls import RESPONSE_TEMPLATE
from tests.environments.worlds import Counts


@pure
def show(value: Any, times: int = 1) -> Any:
    """Show a value.

    Args:
        value: The value.
        times: How often.
    """
    return [value] * times


FORMATS: list[Any] = [  # and which of `_calls` is theirs
    ("hermes", 0),
    ("qwen_coder", 2),
    ("llama", 3),
    ("mistral", 4),
    ("gpt_oss", 5),
    (RESPONSE_TEMPLATE, 6),
]


def environment(call_format: Any = "hermes") -> Tools:
    return Tools(tools=[calculator, answer, show], calls=call_format, max_calls=2)


def hermes(name: str, *, id: str | None = None, **arguments: Any) -> str:
    call = {"name": name, "arguments": arguments, **({} if id is None else {"id": id})}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def _calls(name: str, arguments: dict[str, Any], id: str | None) -> list[str]:
    """The call in the way of each family."""
    given = json.dumps(arguments)
    xml = "".join(f"<parameter={key}>\n{json.dumps(value)}\n</parameter>" for key, value in arguments.items())
    return [
        hermes(name, id=id, **arguments),
        hermes(name, id=id, **arguments).replace(", ", ",  "),
        f"<function={name}>{xml}</function>",
        f'<|python_tag|>{{"name": "{name}", "parameters": {given}}}',
        f"[TOOL_CALLS]{name}[ARGS]{given}" if id is None else f"[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{given}",
        f"to=functions.{name}<|channel|>commentary<|message|>{given}<|call|>",
        f"<|call>{name}{given}<call|>",
    ]


VALUES: list[Any] = [
    1,
    1.0,
    True,
    "1",
    None,
    [1],
    [True],
    {"a": 1, "b": 2},
    {"b": 2, "a": 1},
    -0.0,
    0.0,
    1e300,
    "\ud800",
]
ARGUMENTS: list[dict[str, Any]] = [
    *({"value": value, **times} for value in VALUES for times in ({}, {"times": 0}, {"times": 2}, {"times": "2"})),
    *({"expression": expression} for expression in ("1+1", "1 + 1", "2/0", "x")),
    *({"b": 1, "a": 1}, {"a": 1, "b": 1}, {}),
]
WORDS = ["", "Well. ", "<think>", "</think>", "[/THINK]", "<tool_call>{", "[TOOL_CALLS]", "[" * 2000]


def said(draw: random.Random, way: int) -> str:
    """Words and calls, most of them in one family's way."""
    pieces = []
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        name = draw.choice(("show", "show", "calculator", "answer", "shwo"))
        calls = _calls(name, draw.choice(ARGUMENTS), draw.choice((None, "x", "y")))
        pieces += [draw.choice(WORDS[:3]), draw.choice([*[calls[way]] * 9, *calls])]
    if draw.random() < 0.2:
        pieces.insert(draw.randint(0, len(pieces)), draw.choice(WORDS))
    return "".join(pieces)


@pytest.mark.parametrize(("call_format", "way"), FORMATS, ids=lambda value: str(value)[:10])
def test_equal_keys_are_equal_replies(call_format: Any, way: int) -> None:
    """Over random transcripts: rows, earlier turns and other words differ, the reply of a key does not."""
    asked, draw = environment(call_format), random.Random(way)
    found: dict[str, str] = {}
    for number in range(2000):
        earlier = [Turn(text=said(draw, way), reply=f"reply {number}") for _ in range(draw.randint(0, 2))]
        row, turns = {"prompt": f"prompt {number}"}, [*earlier, Turn(text=said(draw, way))]
        reply = repr(checked_reply(asked.reply(row, turns)))  # 1 is not 1.0 there
        assert found.setdefault(key_of(asked, row, turns), reply) == reply
    assert 200 < len(found) < 1700, "else nothing is compared"


def test_what_the_policy_says_beside_its_calls_plays_no_part() -> None:
    call, same = (
        hermes("show", value={"a": [1]}),
        '<tool_call>\n{"arguments":{"value":{"a":[1]}},"name":"show"}</tool_call>',
    )
    one, other = [Turn(text=f"<think>I show it.</think>{call}")], [Turn(text=f"{same} There.")]
    assert key_of(environment(), {"prompt": "a"}, one) == key_of(environment(), {"prompt": "b"}, other)
    later = [[Turn(text=hermes("answer"), reply=reply), Turn(text=call)] for reply in ("x", "y")]
    assert key_of(environment(), {}, later[0]) == key_of(environment(), {}, later[1])
    assert key_of(environment(), {}, later[0]) != key_of(environment(), {}, one), "the ids of its calls count turns"
    named = hermes("show", value=1, id="x")
    assert key_of(environment(), {}, [Turn(text=named)]) == key_of(environment(), {}, [later[0][0], Turn(text=named)])


def test_a_subclass_may_reply_by_more() -> None:
    class Wise(Tools):
        def reply(self, row, turns):
            return row["hint"]

    wise, turns = Wise(tools=[show], calls="hermes"), [Turn(text="x")]
    assert wise.is_pure
    assert key_of(wise, {"hint": "a"}, turns) != key_of(wise, {"hint": "b"}, turns)


def test_a_key_is_what_an_environment_or_a_task_says() -> None:
    class Last(Counts):
        def memory_key(self, row, turns):
            return turns[-1].text

    class LastOfTask(RunningSum):
        def memory_key(self, row, turns):
            return turns[-1].text

    turns = [Turn(text="a", reply="b"), Turn(text="c")]
    for asked in (Last(), LastOfTask()):
        assert key_of(asked, {"prompt": "x"}, turns) == key_of(asked, {"prompt": "y"}, turns[1:])
    assert key_of(RunningSum(), {"prompt": "x"}, turns) != key_of(RunningSum(), {"prompt": "x"}, turns[1:])


def test_a_key_that_cannot_be_made_names_the_class_and_the_line() -> None:
    class Forgets(Counts):
        def memory_key(self, row, turns):
            return row["number"]

    words = r"environment=tests\.environments\.test_reply_cache_keys\..*Forgets: memory_key raised KeyError: 'number' \(test_reply_cache_keys"
    with pytest.raises(HookError, match=words):
        key_of(Forgets(), {}, [Turn(text="a")])
