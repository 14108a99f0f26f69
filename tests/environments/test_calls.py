"""Tool calls in text: good ones of each family, malformed ones, and hostile text."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from rhymerl.environments.calls import FAMILIES, Family, ToolCall, family_of, read_calls

CODE = 'print("a {b} \\" }}")\nif x < 3: y = [{}]  # </tool_call> <|call|> [TOOL_CALLS] </think>'
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def written(family: Family, name: str, arguments: dict[str, Any]) -> str:
    """A call as a policy of this family writes it."""
    text = json.dumps(arguments)
    match family:
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
        case "llama":
            return f'<|python_tag|>{{"name": "{name}", "parameters": {text}}}'
        case "mistral":
            return f"[TOOL_CALLS]{name}[ARGS]{text}"
        case "gpt_oss":
            return f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


@pytest.mark.parametrize("family", FAMILIES)
def test_several_calls_keep_their_order_and_what_stands_between_is_no_call(family: Family) -> None:
    calls = [("run", {"code": CODE}), ("search", {"query": "日本 🙂", "note": ""}), ("stop", {})]
    text = "\n".join(written(family, name, arguments) for name, arguments in calls)
    if family in ("hermes", "qwen_coder"):
        text = f"Let me see.\n{text}\nThat is all."
    assert read_calls(text, family) == [ToolCall(name=name, arguments=arguments) for name, arguments in calls]


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_call_there_is_none(family: Family) -> None:
    for text in ("", "The answer is 42.", '{"answer": 42}', "a < b; c > d", "tool_call"):
        assert read_calls(text, family) == []


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', [ToolCall(name="f", arguments={"a": 1})]),
        ("hermes", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', [ToolCall(name="f"), ToolCall(name="g")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [ToolCall(name="f", arguments={"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', [ToolCall(name="f", arguments={"a": "1\n2"})]),
        ("llama", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', [ToolCall(name="f", arguments={"a": 1}), ToolCall(name="g")]),
        ("llama", '\n{"type": "function", "name": "f", "parameters": {}}<|eom_id|>', [ToolCall(name="f")]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]', [ToolCall(name="f", arguments={"a": 1}, id="abcdefghi"), ToolCall(name="g")]),
        ("mistral", 'Well.[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}', [ToolCall(name="f", arguments={"a": 1}), ToolCall(name="g", id="123456789")]),
        ("gpt_oss", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', [ToolCall(name="f", arguments={"a": 1})]),
        ("gpt_oss", "<|channel|>analysis<|message|>call f<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>", [ToolCall(name="f")]),
        ("qwen_coder", "<function=f><parameter=a>\n\n x\n\n</parameter></function>", [ToolCall(name="f", arguments={"a": "\n x\n"})]),
        ("qwen_coder", "<function=f>\n<parameter=a>1</function></parameter>\n</function>", [ToolCall(name="f", arguments={"a": "1</function>"})]),
    ],
)  # fmt: skip
def test_forms(family: Family, text: str, expected: list[ToolCall]) -> None:
    assert read_calls(text, family) == expected


GOOD = {family: written(family, "good", {}) for family in FAMILIES}


@pytest.mark.parametrize(
    ("family", "text", "name", "error"),
    [
        ("hermes", '<tool_call>{"name": "f", "argum', "", "the call is no JSON: Unterminated string starting at (character 14)"),
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "", "the call is no JSON: Expecting property name enclosed in double quotes (character 1)"),
        ("hermes", '<tool_call>{"name": "f"}}</tool_call>', "", "the call is malformed: expected </tool_call> after its JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f", "the arguments of f are no JSON object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{a"}</tool_call>', "f", "the arguments of f are no JSON: Expecting property name enclosed in double quotes (character 1)"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "", "the call is no JSON: NaN is no number"),
        ("hermes", f'<tool_call>{"[" * 10_000}</tool_call>', "", "the call is no JSON: it is nested too deeply"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', "", 'the call is malformed: expected {"name": ..., "arguments": {...}}'),
        ("hermes", f'<tool_call>{{"name": "{"f" * 65}"}}</tool_call>', "", 'the call is malformed: expected {"name": ..., "arguments": {...}}'),
        ("llama", '{"name": "f", "parameters": {"a": "}', "", "the call is no JSON: Unterminated string starting at (character 34)"),
        ("llama", '<|python_tag|>f.call(a="1")', "", "the call is no JSON: Expecting value (character 0)"),
        ("llama", '{"name": "f", "parameters": {}} is what I call', "", "the call is malformed: expected the end of the turn, or ; and another call after its JSON"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ', "f", "the call is no JSON: Expecting value (character 6)"),
        ("mistral", '[TOOL_CALLS][{"name": "f"}', "", "the call is no JSON: Expecting ',' delimiter (character 14)"),
        ("gpt_oss", "to=functions.f<|message|>(1, 2)<|call|>", "f", "the call is no JSON: Expecting value (character 0)"),
        ("qwen_coder", "<function=f><parameter=a>1", "f", "the call of f is malformed: parameter a has no </parameter>"),
        ("qwen_coder", "<function=f><parameter=a>1</parameter>", "f", "the call of f is malformed: it has no </function>"),
    ],
)  # fmt: skip
def test_a_malformed_call_is_an_error_and_hides_no_call_before_it(
    family: Family, text: str, name: str, error: str
) -> None:
    assert read_calls(text, family) == [ToolCall(name=name, error=error)]
    before = f"{GOOD[family]}; " if family == "llama" else GOOD[family]
    calls = read_calls(before + text, family)
    assert calls[0] == ToolCall(name="good")
    assert calls[1].error == error


def test_a_malformed_call_hides_no_call_after_it() -> None:
    found = read_calls(f'<tool_call>{{"name": oops}}</tool_call>{GOOD["hermes"]}', "hermes")
    assert [bool(call.error) for call in found] == [True, False]
    found = read_calls(f"<function=f>{GOOD['qwen_coder']}", "qwen_coder")
    assert found == [
        ToolCall(name="f", error="the call of f is malformed: it has no </function>"),
        ToolCall(name="good"),
    ]


@pytest.mark.parametrize("family", ["hermes", "qwen_coder", "mistral"])
def test_what_is_called_in_thoughts_is_not_called(family: Family) -> None:
    call, thought = GOOD[family], written(family, "thought", {})
    end = "[/THINK]" if family == "mistral" else "</think>"
    assert read_calls(f"<think>I could {thought}{end}\n{call}", family) == [ToolCall(name="good")]
    assert read_calls(f"I could {thought} or <tool_call>{{{end}\n{call}", family) == [ToolCall(name="good")], (
        "begun by the prompt"
    )
    assert read_calls(f"\n<think>I could {thought}", family) == [], "never ended"


HOSTILE = (
    *("<tool_call>", "<tool_call>\n", '<tool_call>{"a', '<tool_call>["\\",', "<tool_call>{", '{"name":', '; {"name":'),
    *("<|python_tag|>", "<|python_tag|>{", "[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS] [", "to=functions.f"),
    *("to=functions.f<|message|>", "to=functions.f ", "<|channel|>x", "<function=", "<function=a><parameter=b>", "<parameter="),
    *("</parameter>", "<function=a>", " ", "\n", "[", "<", "</think>", "<think>", "a", '"', "\\", '<tool_call>"', "; "),
    *('<tool_call>{"name": "f"}</tool_call>', '{"name": "f", "parameters": {}};', "<tool_call>1"),
)  # fmt: skip


def seconds(text: str, family: Family) -> float:
    started = time.process_time()
    read_calls(text, family)
    return time.process_time() - started


@pytest.mark.parametrize("family", FAMILIES)
def test_time_is_proportional_to_the_text_whatever_it_says(family: Family) -> None:
    """A reader whose time grows with the square takes 64 times as long for eight times the text."""
    for unit in HOSTILE:
        short = min(seconds(unit * (12_500 // len(unit)), family) for _ in range(3))
        long = unit * (100_000 // len(unit))
        assert any(seconds(long, family) < 16 * short + 0.05 for _ in range(3)), unit


def test_nothing_is_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    for family in FAMILIES:
        for text in (
            "print('evaluated')",
            "__import__('os').system('echo evaluated')",
            "f(**{'a': print('evaluated')})",
        ):
            for call in read_calls(written(family, "f", {"a": text}), family):
                assert call.arguments == {"a": text}
            opening = written(family, "f", {}).partition("{")[0]
            read_calls(f"{opening}{text}", family)
    assert capsys.readouterr().out == ""


TEMPLATES = {
    "hermes": CHATML + '{% for c in m.tool_calls %}{{ \'<tool_call>\\n{"name": "\' + c.name }}{% endfor %}',
    "qwen_coder": CHATML + "{{ '<tool_call>\\n<function=' + c.name + '>' }}<parameter={{ key }}>",
    "llama": '<|start_header_id|>assistant<|end_header_id|>{{ \'{"name": "\' + c.name + \'", "parameters": \' }}',
    "mistral": "[INST] {{ content }}[/INST]{{ '[TOOL_CALLS] [' }}",
    "gpt_oss": "{{ '<|start|>assistant to=functions.' + c.name }}<|channel|>commentary json<|message|>{{ c.arguments }}<|call|>",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_family_is_seen_in_the_source_of_a_template(family: Family) -> None:
    assert family_of(TEMPLATES[family]) == family


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "<|start_header_id|>{{ m.role }}<|end_header_id|>\n{{ m.content }}<|eot_id|>",
        CHATML + "<tool_call>{{ c.name }}<arg_key>{{ key }}</arg_key>",
    ],
)
def test_a_template_of_no_known_family_is_none(template: str) -> None:
    assert family_of(template) is None


RESPONSE_TEMPLATE = {
    "start_anchor": "<|turn>model\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<\|call>(?P<name>\w+)",
            "close": "<call|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<turn|>", "content": "text"},
    },
}


def test_a_response_template_of_transformers_is_read_by_transformers() -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    text = 'Well. <|call>f{"a": 1}<call|><|call>g{}<call|>'
    assert read_calls(text, RESPONSE_TEMPLATE) == [ToolCall(name="f", arguments={"a": 1}), ToolCall(name="g")]
    assert read_calls("no call", RESPONSE_TEMPLATE) == []
    (call,) = read_calls('<|call>f{"a": ', RESPONSE_TEMPLATE)
    assert call.error == "the call is malformed: json parser could not parse region as JSON."
    (call,) = read_calls("<|call>f[1]<call|>", RESPONSE_TEMPLATE)
    assert call.error == "the arguments of f are no JSON object"
