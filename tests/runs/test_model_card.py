"""The model card is published: whatever a config or a summary says stands in it as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from rhymerl.runs.model_card import write_model_card
from tests.report.directories import make_run

HOSTILE = [
    "x\n\n# Heading",
    "x\r# Heading",
    "x\u2028# Heading",
    "x\n===",
    "[a link](https://evil.example)",
    "![a picture](https://evil.example/x.png)",
    "<script>alert(1)</script>",
    "x</details><img src=x onerror=alert(1)>",
    "<https://evil.example>",
    "**bold** _and_ ~~so on~~",
    "x\n```\n# Heading",
    "x\n~~~\n# Heading",
    "x\n`````\n[a](https://evil.example)\n`````yaml",
    "`[a](https://evil.example)`",
    "``` [a](https://evil.example)",
    "`",
    "\\` [a](https://evil.example)",
    "| a | b |\n|---|---|\n| c | d |",
    "a|b",
    "a\\|b",
    "x\n---\nlicense: mit\n---",
    "org/x # y",
    "org/x\nlicense: mit",
    "org/[a](https:evil)",
    "&lt;b&gt; &#35;",
    "\x1b[31mred \x00",
    "\u202egnp.exe",
    " ",
]
FIELDS = {
    "model": lambda text: {"model": {"path": text}},
    "algorithm": lambda text: {"algo": {"_target_": f"rhymerl.{text}"}},
    "algorithm's setting": lambda text: {"algo": {"_target_": "rhymerl.GRPO", "clip": text, "more": [{"a": text}]}},
    "name of a setting": lambda text: {"algo": {"_target_": "rhymerl.GRPO", f"a{text}": {f"b{text}": 1}}},
    "task": lambda text: {"task": {"_target_": f"rhymerl.tasks.{text}"}},
    "task's setting": lambda text: {"task": {"_target_": "rhymerl.tasks.Sum", f"a{text}": text}},
    "train": lambda text: {"data": {"train": text}},
    "trains": lambda text: {"data": {"train": [text, {"path": text}]}},
    "validation": lambda text: {"data": {"validation": text}},
    "system prompt": lambda text: {"data": {"system_prompt": text}},
    "reward's name": lambda text: {"rewards": {f"a{text}": "my.reward"}},
    "reward": lambda text: {"rewards": {"a": text, "b": {"function": text}}},
    "scheduler": lambda text: {"scheduler": text, "seed": text},
}


def card(folder: Path, config: dict[str, Any], run: Path | None = None) -> str:
    write_model_card(folder, {"callbacks": {"_RunConfig": {"config": config}}, "rhymerl": {"num_rollouts": 5}}, run)
    return (folder / "README.md").read_bytes().decode()


def kinds(text: str) -> list[str]:
    """What there is on the page, inside of paragraphs, too."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    return [kind for token in tokens for kind in (token.type, *_kinds(token.children))]


def _kinds(children: list[Token] | None) -> list[str]:
    return [child.type for child in children or [] if child.type != "text"]


def head_and_body(text: str) -> tuple[dict[str, Any], str]:
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


@pytest.mark.parametrize("field", FIELDS)
def test_no_value_of_a_config_is_markdown_html_or_front_matter(field: str, tmp_path: Path) -> None:
    head, body = head_and_body(card(tmp_path, FIELDS[field]("plain")))
    expected = kinds(body)
    for text in HOSTILE:
        their_head, their_body = head_and_body(card(tmp_path, FIELDS[field](text)))
        assert their_head == head, text
        assert kinds(their_body) == expected, text


def test_no_name_in_a_summary_is_more_than_a_cell(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")

    def kinds_with(name: str) -> list[str]:
        (run / "summary.json").write_text(json.dumps({name: 1, "other": 2}))
        return kinds(head_and_body(card(tmp_path, {}, run))[1])

    expected = kinds_with("plain")
    for text in HOSTILE:
        assert kinds_with(text) == expected, text


def test_values_are_readable(tmp_path: Path) -> None:
    config = {
        "model": {"path": "org/model"},
        "algo": {"_target_": "rhymerl.GRPO"},
        "data": {"train": "/data/train.jsonl", "system_prompt": "Think in `code`,\n  then answer."},
        "rewards": {"exact": "rhymerl.rewards.exact_match"},
    }
    head, body = head_and_body(card(tmp_path, config))
    assert head["base_model"] == "org/model"
    assert "`org/model` after 5 rollout steps of `GRPO`, trained" in body
    assert "- train: `train.jsonl`\n" in body
    assert "- system_prompt: `` Think in `code`, then answer. ``\n" in body
    assert "- rewards: `exact` (`rhymerl.rewards.exact_match`)" in body
