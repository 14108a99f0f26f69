"""Result files say where they come from: commits that exist, settings that their commands give, code that is there."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.figures import JUDGES, RESULTS, changes_since, command_of, commits_of, theme_of
from benchmarks.record import ROOT, git

FILES = [path for path in sorted(RESULTS.iterdir()) if path.suffix in (".json", ".jsonl", ".txt")]
SHORTENED = {"arctic", "traces"}  # in the file


def has_history() -> bool:
    try:
        return git("rev-parse", "--is-shallow-repository") == "false"
    except (OSError, subprocess.CalledProcessError):
        return False


needs_history = pytest.mark.skipif(not has_history(), reason="needs a repository with all of its commits")


def each_file() -> Any:
    return pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def test_every_theme_has_a_file_and_every_file_a_theme() -> None:
    assert set(map(theme_of, FILES)) == set(JUDGES)
    tables = {path.stem for path in RESULTS.glob("*.md")}
    assert tables == {path.stem for path in FILES if path.suffix == ".json"}


@needs_history
@each_file()
def test_a_result_file_is_of_commits_that_are_there(path: Path) -> None:
    commits = commits_of(path)
    assert commits
    for commit in commits:
        assert commit != "unknown"
        assert not commit.endswith("-dirty"), "taken with changes that no commit has"
        git("merge-base", "--is-ancestor", commit, "HEAD")


@each_file()
def test_what_a_figure_judges_is_there(path: Path) -> None:
    assert [each for each in JUDGES[theme_of(path)] if not (ROOT / each).exists()] == []


@needs_history
def test_an_age_counts_the_later_commits_that_touch_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(name: str) -> str:
        (tmp_path / name).write_text("")
        git("add", name)
        git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", name)
        return git("rev-parse", "HEAD")

    monkeypatch.setattr("benchmarks.record.ROOT", tmp_path)
    git("init", "--quiet")
    first = commit("a")
    commit("b")
    commit("c")
    assert [changes_since(first, judged) for judged in (("a",), ("b",), ("b", "c"))] == [0, 1, 2]
    assert changes_since(f"{first}-dirty", ("b",)) == 1


class Parsed(Exception):
    """A script has read its options."""


SCRIPTED = [path for path in FILES if " -m benchmarks." in command_of(path)]


@pytest.mark.parametrize("path", SCRIPTED, ids=lambda path: path.name)
def test_the_command_has_the_settings_of_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args
    read = argparse.Namespace()

    def parse_args(self: argparse.ArgumentParser, words: Any = None) -> argparse.Namespace:
        vars(read).update(vars(parse(self, words)))
        return read

    def stop() -> None:
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(record, "set_threads", lambda threads: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(record, "environment", stop)  # which every script calls before it measures
    _, _, module, *words = shlex.split(command_of(path))
    with pytest.raises(Parsed):
        import_module(module).main(words)
    found = json.loads(path.read_text())["config"]
    given = record.settings(read)
    assert read.out == Path("benchmarks/results")
    assert read.hardware in path.name
    for name in given.keys() & found.keys() - SHORTENED:
        assert given[name] == found[name], name
