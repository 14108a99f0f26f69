"""The pages of the documentation, taken apart."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block; `file` is the name on its first line, as in `# my_drafter.py` or `# my_run.yaml: …`."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        found = re.match(r"# ([\w/]+\.(?:py|yaml))\b", self.text)
        return found[1] if found else None

    @property
    def commands(self) -> list[list[str]]:
        """The words of each line."""
        return [words for line in self.text.splitlines() if (words := shlex.split(line, comments=True))]

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path, language: str) -> list[Block]:
    """All blocks of a language, in order."""
    text = page.read_text()
    return [
        Block(page=page, line=text[: found.start()].count("\n") + 1, language=found[1], text=found[2])
        for found in _FENCE.finditer(text)
        if found[1] == language
    ]


def write_files(page: Path, folder: Path) -> None:
    """Write down every block that is a whole file."""
    for block in [*blocks(page, "python"), *blocks(page, "yaml")]:
        if block.file is not None:
            (folder / block.file).write_text(block.text)


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def code_spans(page: Path) -> list[str]:
    """Everything between single backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def table_after(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    text = page.read_text()
    section = text[text.index(f"\n{heading}\n") :]
    lines = section[section.index("\n|") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@contextmanager
def reader_in(folder: Path) -> Iterator[None]:
    """Enter the folder as a reader does: its modules come first, even if others of their names are imported already."""
    names = [path.stem for path in folder.glob("*.py")]
    before, paths = Path.cwd(), list(sys.path)
    loaded = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = paths
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(loaded)
