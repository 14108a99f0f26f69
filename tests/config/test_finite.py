"""Numbers that are none, such as 1e400, are refused in YAML and in Python."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import pytest
import yaml
from omegaconf import OmegaConf

from rhymerl.config import compose, instantiate, packaged_names
from rhymerl.config.files import packaged_directory
from rhymerl.config.targets import import_target, signature_of
from rhymerl.config.tree import is_component, walk
from rhymerl.errors import ConfigError
from rhymerl.types import MaybeInfinite
from tests.config.packaged import composed

REQUIRED: dict[str, dict[str, Any]] = {"PolicySource": {"path": "x"}}


def classes() -> list[str]:
    """All of ours that a packaged config names."""
    nodes = [node for name in packaged_names() for _, node in walk(OmegaConf.to_container(composed(name)))]
    named = {node["_target_"] for node in nodes if is_component(node)}
    options = [yaml.safe_load(path.read_text()) or {} for path in packaged_directory().glob("*/*.yaml")]
    found = named | {option["_target_"] for option in options if "_target_" in option}
    return sorted(path for path in found if path.startswith("rhymerl.") and not path.endswith(".warmstart"))


def takes_floats(annotation: Any) -> bool:
    return float in (annotation, *get_args(annotation)) and get_origin(annotation) in (None, UnionType)


def settings() -> list[tuple[str, str]]:
    found = [
        (path, *each) for path in classes() for each in signature_of(import_target(path, setting="")).parameters.items()
    ]
    return [
        (path, name)
        for path, name, parameter in found
        if takes_floats(parameter.annotation) and parameter.annotation != MaybeInfinite
    ]


def test_every_number_of_every_packaged_class_is_finite() -> None:
    found = settings()
    assert len(found) > 40
    for (path, name), value in itertools.product(found, [math.inf, -math.inf, math.nan]):
        target = import_target(path, setting="")
        arguments = {**REQUIRED.get(target.__name__, {}), name: value}  # type: ignore[attr-defined]
        with pytest.raises((ConfigError, ValueError), match=name):
            pytest.fail(f"{path} takes {name}={target(**arguments)}")
        with pytest.raises(ConfigError, match=f"{name}={value}: expected"):
            pytest.fail(f"{path} takes {name}={instantiate({'_target_': path, **arguments})}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("update.learning_rate=1e400", "update.learning_rate=inf: expected a finite number"),
        ("update.learning_rate=nan", "update.learning_rate=nan: expected a finite number"),
        ("update.betas=[0.9,nan]", r"update.betas\[1\]=nan: expected a finite number"),
        ("algo.clip_high=1e400", "algo.clip_high=inf: expected a finite number"),
        ("trainer.limit_train_batches=nan", "trainer.limit_train_batches=nan: expected"),
        ("rollout.max_tokens=1e400", "rollout.max_tokens=inf: expected int"),
    ],
)
def test_overrides(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose("quickstart", [words])


def test_a_file_and_what_may_be_infinite(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [quickstart, _self_]\nupdate: {learning_rate: 1e+400}\n")
    with pytest.raises(ConfigError, match="update.learning_rate=inf: expected a finite number"):
        compose(tmp_path / "mine.yaml")
    assert compose("quickstart", ["drafter.length_weight=inf"]).drafter.length_weight == math.inf
    with pytest.raises(ConfigError, match="drafter.length_weight=nan: expected a finite number"):
        compose("quickstart", ["drafter.length_weight=nan"])


class Patient:
    def __init__(self, *, limit_s: float = math.inf, factor: float = 1.0) -> None:
        self.limit_s = limit_s
        self.factor = factor


def test_where_infinity_is_the_default_it_may_be_given() -> None:
    node = {"_target_": f"{__name__}.Patient"}
    assert instantiate({**node, "limit_s": math.inf}).limit_s == math.inf
    with pytest.raises(ConfigError, match="factor=inf: expected a finite number"):
        instantiate({**node, "factor": math.inf})
