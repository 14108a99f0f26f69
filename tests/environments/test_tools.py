"""Calls that are run, and what the policy is told of them."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rhymerl import RunError
from rhymerl.environments import Reply, Tools, Turn
from rhymerl.environments.schema import MisfitArgumentError, fitted
from rhymerl.rewards.resolve import find
from tests.environments import user_tools


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def tools(*names: str, **settings: Any) -> Tools:
    return Tools(tools=[f"tests.environments.user_tools.{name}" for name in names], calls="hermes", **settings)


def replied(environment: Tools, text: str) -> Reply:
    reply = environment.reply({}, [Turn(text=text)])
    assert reply is not None
    return reply


def contents(environment: Tools, text: str) -> list[str]:
    return [message["content"] for message in replied(environment, text).content or ()]  # type: ignore[index]


def test_calls_are_run_in_order_and_their_results_are_messages() -> None:
    reply = replied(tools("add", "echo"), call("add", a=1, b=2) + call("echo", value="x") + call("add", a=5))
    assert reply == Reply(
        content=[
            {"role": "tool", "name": "add", "tool_call_id": "000000000", "content": "3"},
            {"role": "tool", "name": "echo", "tool_call_id": "000000001", "content": "x"},
            {"role": "tool", "name": "add", "tool_call_id": "000000002", "content": "6"},
        ],
        metrics={"tool_calls": 3.0, "tool_errors": 0.0},
    )


def test_a_turn_without_a_call_ends_the_episode() -> None:
    assert tools("add").reply({}, [Turn(text="It is 3.")]) is None


def test_functions_may_be_given_as_they_are_and_the_environment_travels_to_other_processes() -> None:
    environment = pickle.loads(pickle.dumps(Tools(tools=[user_tools.add, user_tools.echo], calls="hermes")))
    assert contents(environment, call("add", a=2)) == ["3"]
    assert [schema["function"]["name"] for schema in environment.tool_schemas] == ["add", "echo"]
    assert environment.tool_schemas[0]["function"]["parameters"]["required"] == ["a"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (call("ad", a=1), "error: there is no tool 'ad'; did you mean add?"),
        (call("search", a=1), "error: there is no tool 'search'; expected one of add, weigh, misbehave"),
        (call("add"), "error: add needs the argument 'a'"),
        (call("add", a=1, c=2), "error: add has no argument 'c'"),
        (call("weigh", unit="kg", mases=[]), "error: weigh has no argument 'mases'; did you mean masses?"),
        (call("add", **{"x" * 10**5: 1, "a": 1}), f"error: add has no argument '{'x' * 79}"),
        (call("add", a="one"), 'error: a="one": expected integer'),
        (call("add", a=True), "error: a=true: expected integer"),
        (call("weigh", unit="lb", masses=[]), 'error: unit="lb": expected one of "kg", "g"'),
        (call("weigh", unit="g", masses=["heavy"]), 'error: masses=["heavy"]: expected array of number'),
        (call("misbehave", how="lines"), "error: ValueError: one line and another"),
        (call("misbehave", how="exit"), "error: SystemExit: 3"),
        (call("misbehave", how="elsehow"), "error: KeyError: 'elsehow'"),
        (call("misbehave", how="key"), "error: TypeError: keys must be str, int, float, bool or None, not tuple"),
        ("<tool_call>{add}</tool_call>", "error: the call is no JSON: Expecting property name enclosed in double quotes (character 1)"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_a_line_for_the_policy(text: str, error: str) -> None:
    reply = replied(tools("add", "weigh", "misbehave"), text + call("add", a=1))
    assert [message["content"] for message in reply.content or ()] == [error, "2"]  # type: ignore[index]
    assert (reply.done, reply.metrics) == (False, {"tool_calls": 2.0, "tool_errors": 1.0})


def test_a_tool_that_cannot_work_at_all_fails_the_episode() -> None:
    with pytest.raises(RunError, match="^the database is gone$"):
        tools("misbehave").reply({}, [Turn(text=call("misbehave", how="broken"))])


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("3", {"type": "integer"}, 3),
        (3.0, {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3", {"type": ["integer", "string"]}, "3"),
        ("0.5", {"type": "number"}, 0.5),
        ("True", {"type": "boolean"}, True),
        ("[1, 2]", {"type": "array", "items": {"type": "integer"}}, [1, 2]),
        ('{"a": "b"}', {"type": "object", "additionalProperties": {"type": "string"}}, {"a": "b"}),
        ("null", {"type": "integer", "nullable": True}, None),
        (None, {"type": "integer", "nullable": True}, None),
        ([1, "a"], {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [1, "a"]),
        ([1], {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, [1]),
        ({"_target_": "os.system"}, {}, {"_target_": "os.system"}),
    ],
)
def test_values_are_taken_for_what_they_can_only_mean(value: Any, schema: dict[str, Any], expected: Any) -> None:
    found = fitted(value, schema, name="it")
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "schema", "error"),
    [
        (3, {"type": "string"}, "it=3: expected string"),
        (3.5, {"type": "integer"}, "it=3.5: expected integer"),
        ("3; import os", {"type": "integer"}, 'it="3; import os": expected integer'),
        (1, {"type": "boolean"}, "it=1: expected boolean"),
        (None, {"type": ["integer", "string"]}, "it=null: expected integer or string"),
        ([1], {"type": "array", "items": {"type": "string"}, "nullable": True}, "it=[1]: expected array of string or null"),
        ([1], {"type": "array", "prefixItems": [{"type": "integer"}] * 2}, "it=[1]: expected array"),
        ({"a": 1}, {"type": "object", "additionalProperties": {"type": "string"}}, 'it={"a": 1}: expected object'),
        (True, {"type": "integer", "enum": [1, 2]}, "it=true: expected one of 1, 2"),
        (0.5, {"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}, "it=0.5: expected string or array of any value"),
        ("[" * 10_000, {"type": "array"}, f'it="{"[" * 79}: expected array'),
    ],
)  # fmt: skip
def test_values_of_another_type_are_misfits(value: Any, schema: dict[str, Any], error: str) -> None:
    with pytest.raises(MisfitArgumentError) as caught:
        fitted(value, schema, name="it")
    assert str(caught.value) == error


def test_results_are_text_or_json_cut_with_a_mark() -> None:
    environment = tools("echo", "misbehave", max_result_characters=10)
    assert contents(environment, call("echo", value={"a": [1, "é"]})) == ['{"a": [1, … [5 more characters]']
    assert contents(environment, call("echo", value=None) + call("echo", value="x" * 10)) == ["null", "x" * 10]
    assert contents(environment, call("misbehave", how="decimal") + call("misbehave", how="surrogate")) == [
        '"1.5"',
        "?",
    ]


def test_async_tools_and_rewards_of_tools() -> None:
    reply = replied(tools("wait", "praise"), call("wait", seconds=0) + call("praise") + call("praise"))
    assert [message["content"] for message in reply.content or ()] == ["waited", "well done", "well done"]  # type: ignore[index]
    assert (reply.reward, reply.metrics["praise"]) == (0.5, 2.0)


def test_calls_beyond_the_limit_are_not_run() -> None:
    found = contents(tools("add", max_calls=2), call("add", a=1) * 5)
    assert found == ["2", "2", "error: only the first 2 calls of a turn are run"]


def test_methods_of_a_class_are_tools_with_a_state_of_the_episode() -> None:
    environment, row = tools("Counter", "add"), {"start": 10, "prompt": "Count!"}
    assert [schema["function"]["name"] for schema in environment.tool_schemas] == ["count", "add"]
    turns = [Turn(text=call("count")), Turn(text=call("count", step=5) + call("count")), Turn(text=call("count"))]
    expected = [["11"], ["16", "17"], ["18"]]
    session, other = environment.open(row), environment.open({"start": 0})
    assert session is not None
    assert other is not None
    user_tools.Counter.closed.clear()
    for number in range(3):
        reply = session.reply(row, turns[: number + 1])
        assert [message["content"] for message in reply.content] == expected[number]  # type: ignore[union-attr]
        assert environment.reply(row, turns[: number + 1]) == reply, "without a session"
    session.close()
    other.close()
    assert user_tools.Counter.closed == [11, 17, 18, 18, 0]
    assert tools("add").open(row) is None


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["without_hints"], "Argument a is missing a type hint in function without_hints"),
        (["without_docstring"], "Cannot generate JSON schema for without_docstring because it has no docstring!"),
        (["without_argument_docs"], "Cannot generate JSON schema for without_argument_docs because the docstring has no description for the argument 'a'"),
        (["of_custom_class"], "Couldn't convert the type hint <class 'decimal.Decimal'> to a JSON schema"),
        (["größe"], "chat templates carry no such name, expected [A-Za-z0-9_-]{1,64}"),
        (["with_any"], "expected arguments that can be given by name, no *args, **kwargs or /"),
        (["NUMBER"], "is of type int, expected a function or a class"),
        (["Counter.count"], "is a method; expected its class"),
        (["NeedsAddress"], "is to be made without arguments, and needs address"),
        (["WithoutTools"], "has no public method with a docstring"),
        (["add", "Elsewhere"], "tools: two have the name 'add'"),
        (["ad"], "tests.environments.user_tools has no 'ad'; did you mean add?"),
        ([], "tools=[]: expected a list of functions or their dotted names, at least one"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_are_one_line_when_they_are_named(names: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=r"^tools") as caught:
        tools(*names)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"^tools='rhymerl.environments.calculator': expected a list"):
        Tools(tools="rhymerl.environments.calculator")
    with pytest.raises(
        ValueError, match=r"^calls='qwen': expected one of hermes, qwen_coder, llama, mistral, gpt_oss$"
    ):
        Tools(tools=[user_tools.add], calls="qwen")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^max_calls=0: expected at least 1"):
        tools("add", max_calls=0)


def tokenizer(chat_template: str | None, response_template: dict[str, Any] | None = None) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    made.chat_template = chat_template
    made.response_template = response_template
    return made


def test_the_way_of_calls_is_found_from_the_tokenizer() -> None:
    environment = Tools(tools=["tests.environments.user_tools.Counter"])
    hermes, other = "{{ '<tool_call>\\n' }}", "{{ '<|call>' }}"
    assert environment.prepare(tokenizer(hermes)).calls == "hermes"
    assert environment.prepare(tokenizer(hermes, {"fields": {}})).calls == "hermes"
    assert environment.prepare(tokenizer(other, {"fields": {}})).calls == {"fields": {}}
    assert tools("add").prepare(tokenizer(None)).calls == "hermes", "as it is named"
    lack = "^calls=None: the chat template writes tool calls in no way that is known; expected one of hermes"
    with pytest.raises(ValueError, match=lack):
        environment.prepare(tokenizer(other))
    with pytest.raises(ValueError, match=r"^calls=None: the chat template is missing; expected one of hermes"):
        environment.prepare(tokenizer(None))
    with pytest.raises(ValueError, match=r"^calls=None: expected a family of chat templates"):
        environment.reply({"start": 0}, [Turn(text=call("count"))])


def test_a_chat_template_takes_the_schemas_and_the_replies() -> None:
    template = (
        "{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.parameters | tojson }}\n{% endfor %}"
        "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.tool_call_id }}: {{ m.content }}\n{% endfor %}<tool_call>"
    )
    environment = Tools(tools=[user_tools.add]).prepare(tokenizer(template))
    reply = replied(environment, call("add", a=1))
    text = tokenizer(template).apply_chat_template(reply.content, tools=environment.tool_schemas, tokenize=False)
    schema = environment.tool_schemas[0]["function"]["parameters"]
    assert text == f"add: {json.dumps(schema)}\ntool add 000000000: 2\n<tool_call>"


def test_an_argument_that_names_a_class_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "this", raising=False)
    assert contents(tools("echo"), call("echo", value={"_target_": "this.s"})) == ['{"_target_": "this.s"}']
    assert "this" not in sys.modules
    assert find("tests.environments.user_tools.echo", argument="it").target is user_tools.echo
