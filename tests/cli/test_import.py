"""`import rhymerl` is light: what needs torch, numpy or lightning comes when first used."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

import rhymerl

HEAVY = ("torch", "numpy", "numba", "transformers", "lightning", "hydra", "omegaconf", "rich")


def imported_by(code: str) -> set[str]:
    words = [sys.executable, "-c", f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"]
    return set(json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout))


@pytest.mark.parametrize(
    "module", ["rhymerl", "rhymerl.cli", "rhymerl.config", "rhymerl.schedulers", "rhymerl.drafters"]
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    assert imported_by(f"import {module}").isdisjoint(HEAVY)


def test_composing_light_components_needs_no_torch() -> None:
    code = "from rhymerl.config import instantiate; instantiate({'_target_': 'rhymerl.tasks.RunningSum'})"
    assert imported_by(code).isdisjoint({"torch", "transformers", "lightning"})


def test_import_is_fast() -> None:
    """The best of three: the machine may be busy."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import rhymerl"], check=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3


def test_names() -> None:
    assert len(set(rhymerl.__all__)) == len(rhymerl.__all__)
    assert set(rhymerl.__all__) <= set(dir(rhymerl))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = rhymerl.Nothing


@pytest.mark.parametrize("name", rhymerl.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(rhymerl, name) is not None
