"""MkDocs hooks of this site: pages from elsewhere in the repository, notebooks, and formulas as MathML."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pages
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_FETCHED = re.compile(
    r'<(?:script|img|iframe)[^>]* src="?(?:https?:)?//[^>]*>|<link[^>]*stylesheet[^>]* href="?(?:https?:)?//[^>]*>'
)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


class NotebookFile(File):
    """A notebook is a page, not a download."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add each page that is made, and each picture that a page links to."""
    settings = Path(config.site_dir).parent / pages.SETTINGS
    made = {place: pages.text_of(path) for place, path in pages.sources().items() if place.endswith(".md")}
    for place, text in (made | pages.reference() | {pages.SETTINGS: settings.read_text()}).items():
        _put(files, File.generated(config, place, content=text))
    for path in pages.sources().values():
        for target in pages.links(path):
            if target.suffix == ".png" and not target.is_relative_to(pages.DOCS):
                _put(files, File.generated(config, pages.place_of(target), abs_src_path=str(target)))
        if path.suffix == ".ipynb":
            _put(files, NotebookFile.generated(config, pages.place_of(path), content=pages.text_of(path)))
    return files


def _put(files: Files, file: File) -> None:
    former = files.get_file_from_path(file.src_uri)
    if former is not None:
        files.remove(former)
    files.append(file)


def on_page_content(content: str, *, page: Page, **_: object) -> str:
    """Formulas become MathML, which browsers show without a script."""

    def formula(found: re.Match[str]) -> str:
        shown = convert(html.unescape(found[3]), display="inline" if found[2] == "(" else "block").replace("\\_", "_")
        if "\\" in shown:
            raise PluginError(f"{page.file.src_uri}: latex2mathml does not know all of {found[3]!r}")
        return shown

    return _FORMULA.sub(formula, content)


def on_post_page(output: str, *, page: Page, **_: object) -> str:
    """Refuse a page for which a browser would fetch something from elsewhere."""
    if found := _FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri}: readers need no network, but this has {found[0]}")
    return output
