"""Generated pages of the site: from files at the root, the package's public names, notebooks and linked files.

Only the standard library is needed, so that the tests look at the same pages as MkDocs (`hooks.py`).
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MOVED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SETTINGS = "reference/settings.md"  # `settings.py` writes it before MkDocs starts
PACKAGES = ("drafters", "budgets", "schedulers", "algos", "rewards", "tasks", "history")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".jsonl": "json"}

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


def sources() -> dict[str, Path]:
    """Return the file behind each page that has one: in docs/, at the root, or linked by such a page."""
    found = {
        path.relative_to(DOCS).as_posix(): path for suffix in ("md", "ipynb") for path in DOCS.rglob(f"*.{suffix}")
    }
    found |= {page: ROOT / name for name, page in MOVED.items()}
    waiting = list(found.values())
    while waiting:
        path = waiting.pop()
        for target in links(path):
            place = place_of(target)
            if target.is_file() and not target.is_relative_to(DOCS) and place not in found and place.endswith(".md"):
                found[place] = target
                waiting.append(target)
    return found


def links(page: Path) -> Iterator[Path]:
    """The files that a Markdown page links to."""
    if page.suffix == ".md":
        for target in _LINK.findall(_FENCE.sub("", page.read_text())):
            if "://" not in target:
                yield Path(posixpath.normpath(page.parent / target))


def place_of(path: Path) -> str:
    """Return a repository file's place in the site: docs/ at the top, other linked files under repository/."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if name in MOVED or path.suffix in (".md", ".png"):
        return MOVED.get(name, f"repository/{name}")
    return f"repository/{name}.md"


def text_of(path: Path) -> str:
    """Return the Markdown of a file as it stands in the site."""
    if path.suffix == ".ipynb":
        return notebook(path)
    if path.suffix != ".md":
        fence = f"```{LANGUAGES.get(path.suffix, 'text')}"
        return f"# {path.relative_to(ROOT).as_posix()}\n\n{fence}\n{path.read_text()}\n```\n"
    return relinked(path)


def relinked(page: Path) -> str:
    """Return a page with its links as they are from its place in the site. Blocks of code stay as they are."""
    here = posixpath.dirname(place_of(page))

    def moved(found: re.Match[str]) -> str:
        target = Path(posixpath.normpath(page.parent / found[1]))
        if "://" in found[1] or not target.exists():
            return found[1]
        return posixpath.relpath(place_of(target), here or ".") + "/" * found[1].endswith("/")

    text = page.read_text()
    edges = [0, *(edge for block in _FENCE.finditer(text) for edge in block.span()), len(text)]
    parts = [text[begin:end] for begin, end in pairwise(edges)]
    return "".join(part if index % 2 else _LINK.sub(moved, part) for index, part in enumerate(parts))


def notebook(path: Path) -> str:
    """Return a notebook as Markdown: its words, its code, and what the code printed when the notebook was saved."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![what the cell above draws](data:image/png;base64,{data['image/png'].strip()})")
            elif shown := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{shown.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


# -- the reference ---------------------------------------------------------------------------------------------------


def reference() -> dict[str, str]:
    """Return a page of public names per package of parts, and one for `rhymerl`'s others; mkdocstrings fills them."""
    names = {package: public_names(ROOT / "rhymerl" / package / "__init__.py") for package in PACKAGES}
    elsewhere = {name for each in names.values() for name in each}
    own = [name for name in public_names(ROOT / "rhymerl" / "__init__.py") if name not in elsewhere]
    pages = {"reference/rhymerl.md": _reference_page("rhymerl", [name for name in own if not name.startswith("__")])}
    return pages | {
        f"reference/{package}.md": _reference_page(f"rhymerl.{package}", names[package]) for package in PACKAGES
    }


def public_names(module: Path) -> list[str]:
    """Return the `__all__` of a module, which is not imported."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]:
            return sorted(ast.literal_eval(node.value))
    raise ValueError(f"{module} has no __all__")


def _reference_page(module: str, names: list[str]) -> str:
    return f"# `{module}`\n\n" + "".join(f"::: {module}.{name}\n\n" for name in names)
