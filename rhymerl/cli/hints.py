"""Suggestions for a word of the command line that nothing knows."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path


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


def did_you_mean_config(word: str) -> str:
    """Suggest for a bare word the config that it names, or nearly so, or to resume the run that it names."""
    from rhymerl.config.files import nearest_file, packaged_names

    if Path(word, "config.yaml").is_file():
        return f"; did you mean rhymerl resume {word}?"
    is_there = word in packaged_names() or (word.endswith(".yaml") and Path(word).is_file())
    near = word if is_there else nearest_file(word)
    return f"; did you mean --config {near}?" if near else ""
