"""The recipes: `rhymerl plan` accepts each on its hardware, and the table of the documentation is what it says.

`shapes/` has the config.json of each model, and nothing else of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rhymerl.cli import main
from rhymerl.config import compose
from rhymerl.runs.plan import in_gib
from tests.documents import ROOT, table_after

SHAPES = Path(__file__).parent / "shapes"
PAGES = ROOT / "docs" / "recipes"
ROWS = table_after(PAGES / "README.md", "## Which one")
PARAMETERS = {  # in millions, as their model cards have it
    "Qwen2.5-0.5B-Instruct": 494,
    "Qwen2.5-1.5B-Instruct": 1544,
    "Qwen2.5-7B-Instruct": 7616,
    "Qwen3-0.6B": 596,
    "Qwen3-1.7B": 1721,
    "Qwen3-4B": 4022,
    "Qwen3-32B": 32762,
}


def name_of(cells: list[str]) -> str:
    (name,) = re.findall(r"`([^`]+)`", cells[1])
    return name


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("cells", ROWS, ids=name_of)
def test_a_recipe_fits_its_hardware_and_takes_what_the_table_says(
    cells: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config, shape = name_of(cells), compose(name_of(cells)).model.path.rpartition("/")[2]
    num_gpus, gib = re.findall(r"\d+", cells[3])
    found = planned(capsys, "--config", config, f"model.path={SHAPES / shape}", "--device-gib", gib)
    worker = sum(found.get("bytes_per_worker", {}).values())
    assert found["fits"]
    assert found.get("worker_fits", True)
    assert cells[2] == shape.removesuffix("-Instruct")
    assert cells[4:] == [in_gib(found["total_bytes"]), in_gib(worker) if worker else ""]
    workers = compose(config).workers or 0
    assert int(num_gpus) == found["ranks"] + workers * compose(config).backend.get("gpus_per_worker", 0)


def test_every_recipe_is_in_the_table_and_on_a_page() -> None:
    listed = {name_of(cells) for cells in ROWS}
    pages = "".join(page.read_text() for page in PAGES.glob("*.md") if page.name != "README.md")
    assert set(re.findall(r"fit --config (\w[\w.]*) data\.train", pages)) == listed


@pytest.mark.parametrize("name", sorted(path.name for path in SHAPES.iterdir()))
def test_a_shape_has_the_parameters_of_its_model(name: str) -> None:
    from rhymerl.models.policy import PolicySource

    model = PolicySource(str(SHAPES / name)).outline()
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(PARAMETERS[name], abs=1)
