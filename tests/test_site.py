"""The documentation's site: pages and navigation agree, and generated pages say what the code says now.

Nothing here needs MkDocs: `make docs` builds the site, and follows every link and anchor in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import rhymerl
from docs.site import notebooks, pages, pictures, settings
from rhymerl.config import compose, resolved
from rhymerl.config.files import groups
from tests.documents import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def nav() -> list[str]:
    """The pages that the navigation names, in order."""
    text = (ROOT / "mkdocs.yml").read_text()
    return list(leaves(yaml.safe_load(text[text.index("\nnav:\n") :])["nav"]))


def leaves(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    else:
        for child in node.values() if isinstance(node, dict) else node:
            yield from leaves(child)


def test_the_navigation_has_every_page_once() -> None:
    own = [page for page in pages.sources() if not page.startswith("repository/")]
    assert sorted(nav()) == sorted([*own, *pages.reference(), pages.SETTINGS])


def test_links_out_of_docs_lead_to_pages_of_the_site() -> None:
    text = pages.text_of(ROOT / "docs" / "drafting_measurements.md")
    assert "(repository/benchmarks/traces/README.md)" in text
    assert "repository/benchmarks/traces/README.md" in pages.sources()
    assert "(drafting.md)" in text
    assert "(docs/extending.md)" in (ROOT / "CONTRIBUTING.md").read_text()
    assert "(extending.md)" in pages.text_of(ROOT / "CONTRIBUTING.md")
    assert "](repository/examples/walkthrough.py.md)" in pages.text_of(ROOT / "docs" / "python.md")


def test_links_in_blocks_of_code_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "DOCS", tmp_path / "docs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "other.py").touch()
    page = tmp_path / "docs" / "page.md"
    page.write_text("[a](../other.py)\n```text\n[b](../other.py)\n```\n[c](https://d.org) [e](#f)\n")
    assert pages.text_of(page) == (
        "[a](repository/other.py.md)\n```text\n[b](../other.py)\n```\n[c](https://d.org) [e](#f)\n"
    )


def test_a_link_to_a_folder_keeps_its_slash_where_there_is_no_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an archive of the repository. Without the slash MkDocs takes `notebooks` for a page that is not there."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "DOCS", tmp_path / "docs")
    (tmp_path / "docs" / "notebooks").mkdir(parents=True)
    outside, page = tmp_path / "CONTRIBUTING.md", tmp_path / "docs" / "page.md"
    outside.write_text("[notebooks](docs/notebooks/) [page](docs/page.md)\n")
    page.write_text("[notebooks](notebooks/) [part](../CONTRIBUTING.md)\n")
    assert pages.text_of(outside) == "[notebooks](notebooks/) [page](page.md)\n"
    assert pages.text_of(page) == "[notebooks](notebooks/) [part](contributing.md)\n"


def test_the_reference_has_every_public_name() -> None:
    shown = "".join(pages.reference().values())
    names = [line.rpartition(".")[2] for line in shown.splitlines() if line.startswith(":::")]
    assert set(rhymerl.__all__) - {"__version__"} <= set(names)
    assert len(names) == len(set(names))


def test_the_settings_are_those_of_base_and_of_every_option() -> None:
    shown = settings.page()
    config = resolved(compose("base"))
    options = groups()
    rows = {
        f"{section}.{name}"
        for section, value in config.items()
        if isinstance(value, dict) and section not in options
        for name in value
        if name != "_target_"
    }
    assert [row for row in sorted(rows) if f"| `{row}` |" not in shown] == []
    assert [f"{g}={n}" for g, names in options.items() for n in names if f"\n## `{g}={n}`\n" not in shown] == []
    assert "| `update.learning_rate` | 1e-06 (float): AdamW at `learning_rate`; after" in shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_print_what_they_show(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    for cell, outputs in zip(cells, notebooks.run(path), strict=True):
        assert [shown(each) for each in cell["outputs"]] == [shown(each) for each in outputs]


def shown(output: dict[str, Any]) -> str:
    return "".join(output.get("text", ())) or output["data"]["text/plain"]


def test_pictures_are_made(tmp_path: Path) -> None:
    pictures.main(tmp_path)
    made = {path.name for path in tmp_path.iterdir() if path.stat().st_size > 10_000}
    assert made == {"passes.svg", "draft_tree.svg", "workers.png"}
    assert made <= {path.name for path in pictures.PICTURES.iterdir()}
