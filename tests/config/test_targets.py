"""Classes are looked up and read anew in each call: nothing is remembered for the rest of the process."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from pathlib import Path

from rhymerl.config.targets import import_target, signature_of
from rhymerl.costs import Points
from rhymerl.drafters.base import Drafter
from rhymerl.schedulers.histopipe import HistoPipeScheduler


def test_a_file_that_has_changed_gives_the_new_class_and_its_arguments(here: Path) -> None:
    before = import_target("my_module.MyFan", setting="drafter")
    assert {"width", "reason"} <= signature_of(before).parameters.keys()
    (here / "my_module.py").write_text("class MyFan:\n    def __init__(self, *, height: int = 3) -> None: ...\n")
    importlib.reload(sys.modules["my_module"])
    after = import_target("my_module.MyFan", setting="drafter")
    assert after is not before
    assert {name: each.default for name, each in signature_of(after).parameters.items()} == {"height": 3}


def test_a_class_whose_constructor_is_replaced_has_its_arguments(here: Path) -> None:
    found = import_target("my_module.MyDrafter", setting="drafter")
    signature_of(found)

    def init(self: Drafter, *, breadth: int = 5) -> None: ...

    found.__init__ = init  # type: ignore[misc]
    assert signature_of(found).parameters.keys() == {"breadth"}


def test_a_default_that_a_factory_makes_is_no_ones_but_the_callers(here: Path) -> None:
    record = import_target("my_module.Record", setting="job.record")
    signature_of(record).parameters["sizes"].default.append(3)
    assert signature_of(record).parameters["sizes"].default == [1, 2]


def test_a_class_is_not_kept_alive(here: Path) -> None:
    found = weakref.ref(import_target("my_module.Greedy", setting="job"))
    signature_of(found())  # type: ignore[arg-type]
    del sys.modules["my_module"]
    gc.collect()
    assert found() is None


def test_a_field_that_a_dataclass_inherits_has_the_names_of_the_module_that_it_is_written_in() -> None:
    assert signature_of(HistoPipeScheduler).parameters["costs"].annotation == str | Points | None
