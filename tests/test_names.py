"""The package speaks the field's words: names, docstrings and docs have none of its former words."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rhymerl"
FILES = sorted(PACKAGE.rglob("*.py"))
# As a whole name or as a word in one: `ParcelBox`, `num_guests`, `_lifeline`.
FORMER_WORDS = {
    *("ashore", "box", "conductor", "drawn", "dull", "farewell", "flight", "goodbye", "guest", "guests", "honesty"),
    *("lifeline", "mail", "meeting", "narrow", "news", "parcel", "promised", "redrawn", "speculation"),
}
FORMER_NAMES = {"Counts", "Line", "Orders", "Part", "Place", "Report", "_Line", "_Report", "_kept"}
FORMER_PROSE = re.compile(
    r"\b(ashore|conductors?|drawn|dull|farewells?|goodbyes?|guests?|lifelines?|news|parcels?)\b", re.IGNORECASE
)
PREPOSITIONS = {
    *("Of", "With", "Whoever", "For", "By", "In", "On", "At", "From", "To", "As", "Under", "Over", "Through"),
    "Without",
}
Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in FILES:
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def names_in(node: ast.AST) -> Iterator[str]:
    """The name that a node brings in or uses, where it is one of ours to choose."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id


def words_of(name: str) -> set[str]:
    """`InFlightRequests` is in, flight and requests; in flight is the field's term, and one word here."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    return set("_".join(words).replace("in_flight", "inflight").split("_"))


@cache
def is_former(name: str) -> bool:
    return name in FORMER_NAMES or bool(words_of(name) & FORMER_WORDS)


@cache
def docstrings() -> list[tuple[str, str]]:
    return [
        (f"{where}:{getattr(node, 'lineno', 1)}", text)
        for where, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, Documented) and (text := ast.get_docstring(node))
    ]


@pytest.mark.parametrize("name", ["Parcel", "_lifeline_fd", "num_guests", "Line", "_kept", "Conductor", "drawn"])
def test_former_names_are_known(name: str) -> None:
    assert is_former(name)


@pytest.mark.parametrize(
    "name", ["InFlightRequests", "num_in_flight", "draw", "is_withdrawn", "line", "kept", "counts"]
)
def test_the_fields_own_words_are_none_of_them(name: str) -> None:
    assert not is_former(name)


def test_no_name_is_a_former_one() -> None:
    found = [
        f"{where}:{node.lineno}: {name}"
        for where, tree in trees()
        for node in ast.walk(tree)
        for name in names_in(node)
        if is_former(name)
    ]
    modules = [path for path in FILES if any(map(is_former, path.relative_to(ROOT).with_suffix("").parts))]
    assert found + modules == []


def test_no_docstring_and_no_page_has_a_former_word() -> None:
    pages = [(path.relative_to(ROOT).as_posix(), path.read_text()) for path in sorted((ROOT / "docs").rglob("*.md"))]
    found = [f"{where}: {match[0]}" for where, text in [*docstrings(), *pages] for match in FORMER_PROSE.finditer(text)]
    assert found == []


def test_docstrings_are_sentences() -> None:
    """Few begin with a preposition, as a sentence without a subject does."""
    found = [f"{where}: {text.splitlines()[0]}" for where, text in docstrings() if text.split()[0] in PREPOSITIONS]
    assert len(found) <= 20, "\n".join(found)


def test_no_two_classes_have_one_name() -> None:
    counts = Counter(node.name for _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(("folder", "most"), [("", 14), ("rollout", 8)])
def test_folders_stay_small(folder: str, most: int) -> None:
    modules = [path.stem for path in (PACKAGE / folder).glob("*.py")]
    assert len(modules) <= most, modules
