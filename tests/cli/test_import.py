"""`import rhymerl` is light: what needs torch, numpy or lightning comes when first used."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType

import pytest

import rhymerl
import rhymerl.config
import rhymerl.drafters
import rhymerl.environments
import rhymerl.rewards
import rhymerl.schedulers

HEAVY = {"lightning", "matplotlib", "numba", "pytorch_lightning", "sglang", "torch", "transformers"}
HANDY = {"numpy", "hydra", "omegaconf", "rich"}
LIGHTEST = ["rhymerl", "rhymerl.cli", "rhymerl.config", "rhymerl.schedulers", "rhymerl.drafters"]
LIGHT = [
    "data.sources",
    "environments",
    "environments.process_main",
    "errors",
    "history",
    "report",
    "rewards",
    "rewards.process_main",
    "runs.early",
    "tasks",
    "types",
]


def imported_by(code: str) -> set[str]:
    program = f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stderr
    return set(json.loads(shown))


@pytest.mark.parametrize("module", [*LIGHTEST, *(f"rhymerl.{name}" for name in LIGHT)])
def test_light_modules_import_nothing_heavy(module: str) -> None:
    assert imported_by(f"import {module}").isdisjoint(HEAVY | HANDY if module in LIGHTEST else HEAVY)


def test_composing_light_components_needs_no_torch() -> None:
    code = "from rhymerl.config import instantiate; instantiate({'_target_': 'rhymerl.tasks.RunningSum'})"
    assert imported_by(code).isdisjoint({"torch", "transformers", "lightning"})


SHOW_HELP = """
from contextlib import suppress
from rhymerl.cli import main
with suppress(SystemExit):
    main(["--help"])
"""


@pytest.mark.parametrize(("code", "most"), [("import rhymerl", 12), (SHOW_HELP, 36)], ids=["import", "help"])
def test_little_is_imported_and_nothing_of_others(code: str, most: int) -> None:
    """So both take no longer than a tenth of a second or two."""
    imported = imported_by(code) - imported_by("pass")
    ours = {name for name in imported if name.partition(".")[0] == "rhymerl"}
    assert 0 < len(ours) <= most
    assert len(imported) <= 6 * most
    assert {name.partition(".")[0] for name in imported - ours} <= sys.stdlib_module_names


LAZY = [rhymerl, rhymerl.config, rhymerl.drafters, rhymerl.environments, rhymerl.rewards, rhymerl.schedulers]


@pytest.mark.parametrize("package", LAZY, ids=lambda it: it.__name__)
def test_names(package: ModuleType) -> None:
    assert len(set(package.__all__)) == len(package.__all__)
    assert dir(package) == sorted({*vars(package), *package.__all__})
    assert [name for name in package.__all__ if getattr(package, name, None) is None] == []
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Nothing'"):
        _ = package.Nothing
