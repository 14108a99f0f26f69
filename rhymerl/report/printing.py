"""Lines and tables for people, on stdout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import get_console
from rich.console import Console
from rich.table import Table


def say(words: str, *, style: str | None = None) -> None:
    """Print a line as it is, however long; above a live line, where there is one on the terminal."""
    get_console().print(words, highlight=False, soft_wrap=True, markup=False, style=style)


def readable(value: float, *, digits: int = 4) -> str:
    """Return so many digits, but all before the point: `0.5234`, `14,251`."""
    words = f"{value:.{digits}g}"
    return f"{value:,.0f}" if abs(value) >= 1000 or "e+" in words else words


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    left: Sequence[str] = (),
    total: Sequence[str] | None = None,
) -> None:
    """Print rows of cells, and `total` as the last one, in bold.

    Columns stand to the right, but for those in `left`, of which the first is never cut short. Without names they have
    no header, and all stand to the left.
    """
    table = Table(title=title, title_justify="left", show_header=bool(columns))
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name in left[:1])
    for row in rows:
        table.add_row(*row)
    if total is not None:
        table.add_section()
        table.add_row(*total, style="bold")
    Console().print(table)
