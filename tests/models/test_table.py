"""The page on models says what the proofs say."""

from __future__ import annotations

from pathlib import Path

from tests.models.table import EXACT, SINGLE, table

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_table_of_families_is_what_the_proofs_say():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    found = table()
    assert len(lines) == len(found)
    # Whether parts in float32 make a difference is each processor's own.
    for line, now in zip(lines, found, strict=True):
        assert line.replace(EXACT, SINGLE) == now.replace(EXACT, SINGLE)
