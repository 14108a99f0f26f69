"""The ranges that a dataclass's fields say, and how a missing package is told."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass

import pytest

from rhymerl.errors import _EXTRAS, at_least, check_ranges, missing_package, require_package
from tests.documents import ROOT


@dataclass(kw_only=True)
class Ranged:
    steps: int = at_least(1, 8)
    rate: float = at_least(0, 0.5)
    limit: int | None = at_least(1, None)
    kept: int | None = at_least(1, 64)


def test_values_in_their_ranges_and_none_where_it_is_the_default_are_accepted() -> None:
    check_ranges(Ranged())
    check_ranges(Ranged(steps=1, rate=0, limit=1))


def test_none_is_accepted_where_the_type_has_it_whatever_the_default() -> None:
    check_ranges(Ranged(kept=None))
    with pytest.raises(ValueError, match="^kept=0: expected at least 1$"):
        check_ranges(Ranged(kept=0))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Ranged(steps=0, rate=-1), "steps=0: expected at least 1"),
        (Ranged(rate=-0.1), "rate=-0.1: expected at least 0"),
        (Ranged(rate=math.inf), "rate=inf: expected a finite number"),
        (Ranged(rate=math.nan), "rate=nan: expected a finite number"),
        (Ranged(limit=0), "limit=0: expected at least 1"),
    ],
)
def test_the_first_value_out_of_its_range_is_refused(settings: Ranged, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        check_ranges(settings)


def test_a_missing_package_names_its_extra() -> None:
    require_package("numpy", "this")
    assert str(missing_package("math_verify", "a reward")) == "a reward needs math-verify: pip install 'rhymerl[math]'"


def test_extras_are_those_of_the_package_and_their_hint_is_written_once() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in _EXTRAS.items():
        assert any(each.startswith(package.replace("_", "-")) for each in extras[extra])
    assert set(_EXTRAS.values()) == extras.keys() - {"dev"}
    hint = re.compile(r"pip install 'rhymerl\[(?!NAME)")
    assert [path.name for path in (ROOT / "rhymerl").rglob("*.py") if hint.search(path.read_text())] == ["errors.py"]
