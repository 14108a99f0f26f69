"""Writes the page of all settings, by `rhymerl explain`: python docs/site/settings.py FILE."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from rhymerl.config import compose
from rhymerl.config.explain import Explanation, explain, in_yaml
from rhymerl.config.files import groups

HEAD = """# Settings

All settings of a training run, as `rhymerl explain` says them: read from constructors, docstrings and the comments in config files. Values are those of
`configs/base.yaml`; `rhymerl explain SETTING --config NAME` says those of another config, and where they are set. [Configuration](../configuration.md) says how to set them.
"""


def page() -> str:
    """Return the page as Markdown."""
    config = compose("base", ["run_dir=runs/base-TIME"])  # else the time of the build
    options = groups()
    single = [explain(config, key, "base") for key in config if key not in options]
    sections = [each for each in single if each.settings]
    parts = [HEAD, "## At the top\n", *_table([each for each in single if not each.settings])]
    for section in sections:
        parts += [f"## `{section.key}`\n", *_section(section)]
    for group, names in sorted(options.items()):
        chosen = explain(config, group, "base").owner
        for name in names:
            found = explain(compose("base", [f"{group}={name}"]), group, "base", [f"{group}={name}"])
            note = "The default.\n" if found.owner == chosen else ""
            parts += [f"## `{group}={name}`\n", note, *_section(found)]
    return "\n".join(parts) + "\n"


def _section(found: Explanation) -> Iterator[str]:
    if found.owner is not None:
        yield f"Class `{found.owner}`.\n"
    yield found.about + "\n"
    if found.settings:
        yield "| setting | value, type and what it is for |\n|---|---|"
        yield from (f"| `{found.key}.{name}` | {_cell(words)} |" for name, words in found.settings.items())
        yield ""


def _table(settings: list[Explanation]) -> Iterator[str]:
    yield "| setting | value | |\n|---|---|---|"
    yield from (f"| `{each.key}` | {_cell(in_yaml(each.value))} | {_cell(each.about)} |" for each in settings)
    yield ""


def _cell(words: str) -> str:
    return (
        words.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|").replace("${", "&#36;{").replace("<", "&lt;")
    )


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page())
