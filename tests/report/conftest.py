"""A run to report on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.directories import make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "mine")
