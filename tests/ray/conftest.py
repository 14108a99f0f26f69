from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.commands import temporary


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path) -> Iterator[Path]:
    """Where Ray's files of a test lie."""
    folder = temporary(tmp_path)
    yield folder
    shutil.rmtree(folder)
