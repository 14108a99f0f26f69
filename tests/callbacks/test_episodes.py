"""Episodes in files and tables: what the policy said and what came back are told apart, whatever stands in them."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.callbacks.samples import conversation, lines_of, markdown_table, sample_row, show_samples
from rhymerl.callbacks.steps import _parts
from rhymerl.drafts import NOT_DRAFTED, DraftSource
from rhymerl.testing import make_requests
from rhymerl.types import Completion, Output, Sample, TurnEnd
from tests.environments.families import FAMILIES

EVIL = "<img src=x onerror=alert(1)> | </pre>\n`"
TOOLS = [{"role": "tool", "name": "add", "content": "42"}, {"role": "tool", "content": "7"}]


class Module:
    """Speaks in bytes, of which a character may have several."""

    tokenizer = FAMILIES["qwen2.5"].tokenizer()

    def decode(self, token_ids) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


def episode(parts: list[list[int]], replies: list[object] | None = None) -> Sample:
    """Return an episode whose parts are in turn the policy's and the environment's.

    The environment was asked about as many turns as there are `replies`; without replies there is no environment.
    """
    module = Module()
    replies = ["text"] * (len(parts) // 2) if replies is None else replies
    tokens = [token for part in parts for token in part]
    sources = [NOT_DRAFTED if n % 2 else DraftSource.OWN for n, part in enumerate(parts) for _ in part]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    turns = []
    for n, part in enumerate(parts[::2] if replies else ()):
        start, stop = ends[2 * n], ends[min(2 * n + 1, len(ends) - 1)]
        asked = {"reply": replies[n], "reward": 0.5, "waited_s": 1.25, "replied_at": 7.0} if n < len(replies) else {}
        turns.append(TurnEnd(start=start, stop=stop, text=module.decode(part), **asked))
    output = replace(
        Output.of(tokens, finish_reason="max_turns"), sources=np.array(sources, np.int8), turns=tuple(turns)
    )
    completion = Completion(request=make_requests(1)[0], output=output)
    text = module.decode(tokens)
    return Sample(completion=completion, text=text, reward=0.0, rewards={}, loss_mask=output.sampled)


def said(*texts: str) -> list[list[int]]:
    return [Module().encode(text) for text in texts]


@given(st.lists(st.text("ab é🙂\n<|im_end|>你", min_size=1), min_size=2, max_size=6))
def test_what_was_said_and_what_came_back_are_the_text_in_its_order(texts: list[str]) -> None:
    sample = episode(said(*texts))
    parts = _parts(sample.completion.output, Module().decode)
    start, found = 0, []
    for turn in parts["turns"]:
        found += [sample.text[start : turn["start"]], sample.text[turn["start"] : turn["stop"]]]
        start = turn["stop"]
    expected = [Module().decode(part) for part in said(*texts)]
    assert found == [*expected, *[""] * (len(texts) % 2)]
    assert start == len(sample.text)
    assert sum(count for count, _ in parts["runs"]) == len(sample.text)
    assert parts["finish_reason"] == "max_turns"


def test_half_a_character_at_the_end_of_a_turn_stays_there() -> None:
    half = Module().encode("🙂")[:-1]
    assert len(half) > 0
    sample = episode([[*Module().encode("so"), *half], Module().encode("é?"), Module().encode("ok")])
    turn, last = _parts(sample.completion.output, Module().decode)["turns"]
    assert sample.text[: turn["start"]].startswith("so")
    assert sample.text[turn["start"] : turn["stop"]] == "é?"
    assert (last["start"], last["waited_s"]) == (len(sample.text), None)
    row = sample_row(sample, Module())
    json.loads(lines_of([row]).encode().decode())
    assert [each["text"] for each in row["turns"]][1:] == ["ok"]


def test_a_character_of_tokens_from_two_sources_is_counted_once() -> None:
    sample = episode(said("é🙂 你"), replies=[])
    tokens = sample.completion.token_ids
    assert len(tokens) > len(sample.text)
    output = replace(sample.completion.output, sources=np.arange(len(tokens), dtype=np.int8) % 2)
    runs = _parts(output, Module().decode)["runs"]
    assert len(runs) == len(tokens)
    assert sum(count for count, _ in runs) == len(sample.text)


def test_an_answer_of_one_turn_is_as_it_always_was() -> None:
    sample = episode(said("hello you"), replies=[])
    assert _parts(sample.completion.output, Module().decode) == {"runs": [[9, DraftSource.OWN]]}
    assert "turns" not in sample_row(sample, SimpleNamespace())


def test_an_engine_that_tells_no_sources_has_turns_all_the_same() -> None:
    sample = episode(said("one", "two", "three"))
    output = replace(sample.completion.output, sources=None)
    parts = _parts(output, Module().decode)
    assert parts["runs"] is None
    assert (parts["turns"][0]["start"], parts["turns"][0]["stop"]) == (3, 6)


def test_tables_say_who_says_what() -> None:
    sample = episode(said("1+1", "tool\n42", "it is 42"), replies=[TOOLS, None])
    row = {"step": 1, **sample_row(sample, Module())}
    assert [each.get("tools") for each in row["turns"]] == [["add", "a tool"], []]
    assert row["turns"][0] == {
        "text": "1+1",
        "reply": "tool\n42",
        "tools": ["add", "a tool"],
        "reward": 0.5,
        "waited_s": 1.25,
    }
    words = conversation(row["turns"])
    assert words == ("policy: 1+1\nadd, a tool (reward 0.5): tool\n42\npolicy: it is 42\nenvironment (reward 0.5)")
    shown = {}
    logger = SimpleNamespace(log_table=lambda key, **table: shown.update(table))
    show_samples(logger, [row], global_step=1)
    assert words in shown["data"][0]
    assert json.loads(lines_of([row]))["response"] == sample.text, "what is on file is what rewards got"


@pytest.mark.parametrize("words", [EVIL, "x" * 10**6], ids=["markup", "huge"])
def test_what_stands_in_turns_breaks_no_table(words: str) -> None:
    tools = [{"role": "tool", "name": words, "content": words}]
    sample = episode([[5, 6], [7], [8]], replies=[tools])
    row = {"step": 1, **sample_row(sample, SimpleNamespace(decode=lambda ids: words))}
    assert max(len(name) for name in row["turns"][0]["tools"]) <= 64
    table = markdown_table([{**row, "response": conversation(row["turns"])}])
    assert len(table.splitlines()) == 3
    assert json.loads(lines_of([row])) == json.loads(json.dumps(row))
