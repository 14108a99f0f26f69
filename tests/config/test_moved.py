"""Paths of earlier versions lead to where things are now."""

from __future__ import annotations

import importlib

import pytest

from rhymerl.config import moved
from rhymerl.config.moved import current_path
from rhymerl.config.targets import import_target


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("rhymerl.update.UpdateSettings", "rhymerl.training.settings.UpdateSettings"),
        ("rhymerl.policy.PolicySource", "rhymerl.models.policy.PolicySource"),
        ("rhymerl.module.RhymeModule", "rhymerl.training.module.RhymeModule"),
        ("rhymerl.drafters.NoDrafter", "rhymerl.drafters.none.NoDrafter"),
    ],
)
def test_a_former_path_names_the_same_class(path: str, name: str) -> None:
    found = import_target(path, setting="part")
    assert f"{found.__module__}.{found.__qualname__}" == name


def test_the_table_leads_to_modules_and_from_none() -> None:
    for former, new in moved._MOVED.items():
        importlib.import_module(new)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(former)


def test_other_paths_stay() -> None:
    for path in ("rhymerl", "rhymerl.types.Sample", "my.policy.Policy", "rhymerl.policys.Policy"):
        assert current_path(path) == path
