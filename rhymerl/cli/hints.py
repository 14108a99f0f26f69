"""Suggestions for a word of the command line that nothing knows."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

_COMMANDS_ELSEWHERE = {
    "generate": "rollout",
    "sample": "rollout",
    "train": "fit",
    "eval": "evaluate",
    "validate": "evaluate",
    "test": "evaluate",
    "continue": "resume",
    "benchmark": "bench",
}


def did_you_mean_option(word: str, following: Sequence[str], parser: ArgumentParser) -> str:
    """Suggest for a word that begins with a dash the nearest option, else an override (`--seed 3`: `seed=3`)."""
    name, equals, value = word.partition("=")
    near = get_close_matches(name, [each for action in parser._actions for each in action.option_strings], n=1)
    if near:
        return f"; did you mean {near[0]}?"
    if not equals and following and not following[0].startswith("-") and "=" not in following[0]:
        value = following[0]
    key = name.lstrip("-")
    return f"; did you mean {key}={value}?" if key and value else ""


def did_you_mean_command(word: str, names: Sequence[str]) -> str:
    """Suggest the nearest command for an unknown word, or the command of that name in other projects."""
    near = _COMMANDS_ELSEWHERE.get(word) or next(iter(get_close_matches(word, names, n=1)), None)
    return f"; did you mean {near}?" if near else ""


def did_you_mean_config(word: str, kind: str) -> str:
    """Suggest the config of this kind that a bare word means, or resuming the run that it names."""
    from rhymerl.cli.kinds import names_of
    from rhymerl.config.files import nearest_file

    if Path(word, "config.yaml").is_file():
        return f"; did you mean rhymerl resume {word}?"
    names = names_of(kind)
    is_there = word in names or (word.endswith(".yaml") and Path(word).is_file())
    near = word if is_there else nearest_file(word, names)
    return f"; did you mean --config {near}?" if near else ""
