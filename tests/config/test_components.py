from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from rhymerl.config import compose, construct, describe, instantiate
from rhymerl.config.targets import import_target
from rhymerl.drafters import Drafter, NoDrafter
from rhymerl.errors import ConfigError
from rhymerl.schedulers import FIFOScheduler, Scheduler
from rhymerl.tasks import RunningSum

pytestmark = pytest.mark.usefixtures("here")


def make(name: str, **settings: Any) -> Any:
    return instantiate({"_target_": f"my_module.{name}", **settings})


def test_nested_components_lists_and_mappings_are_built() -> None:
    built = instantiate(
        {
            "a": [{"_target_": "rhymerl.drafters.NoDrafter"}],
            "b": (1, {"_target_": "rhymerl.tasks.RunningSum"}),
        }
    )
    assert isinstance(built["a"][0], NoDrafter)
    assert isinstance(built["b"][1], RunningSum)


def test_objects_pass_through() -> None:
    drafter = NoDrafter()
    assert instantiate(drafter) is drafter
    assert make("Job", drafter=drafter).drafter is drafter
    assert instantiate(None) is None


def test_values_get_the_types_that_constructors_ask_for() -> None:
    settings = make("Settings", where="a/b", betas=["0.1", 1], items=[3.0], rate=1)
    assert (settings.where, settings.betas, settings.items) == (Path("a/b"), (0.1, 1.0), [3])
    assert isinstance(settings.rate, float)


def test_functions_are_targets_too() -> None:
    job = {"_target_": "my_module.Job", "drafter": {"_target_": "my_module.MyDrafter"}}
    assert make("run", job=job, times=2)[1] == 2


@pytest.mark.parametrize(
    "component",
    [
        lambda: RunningSum(difficulty=3, seed=5),
        NoDrafter,
        FIFOScheduler,
        lambda: make("Settings", where="x", betas=(1, 2), free={"a": [1, {"b": None}]}),
        lambda: make("Record", sizes=[3]),
        lambda: make("Job", drafter=make("MyDrafter", inner=make("MyDrafter", depth=7)), task=RunningSum()),
    ],
)
def test_describe_is_the_inverse(component: Any) -> None:
    described = describe(component())
    assert describe(instantiate(described)) == described
    assert set(described) > {"_target_"} or component in (NoDrafter, FIFOScheduler)


def test_describe_writes_plain_containers() -> None:
    described = describe(make("Job", drafter=make("MyDrafter", depth=4), rewards={"a": describe}))
    assert described == {
        "_target_": "my_module.Job",
        "drafter": {"_target_": "my_module.MyDrafter", "depth": 4, "max_nodes": 8, "inner": None},
        "task": None,
        "rewards": {"a": "rhymerl.config.components.describe"},
        "record": None,
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [("Forgetful", "no attribute 'size'.*attribute of the same name"), ("Greedy", r"\*\*kwargs")],
)
def test_describe_tells_the_convention(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        describe(make(name))


def test_describe_writes_numbers_of_python() -> None:
    """A checkpoint that is read without running code cannot hold those of numpy."""
    settings = make("Settings", free={"a": [np.int64(3), np.float32(0.5), np.float64(0.25), np.str_("x"), True]})
    assert [(type(each), each) for each in describe(settings)["free"]["a"]] == [
        (int, 3),
        (float, 0.5),
        (float, 0.25),
        (str, "x"),
        (bool, True),
    ]


def test_a_closure_cannot_be_named() -> None:
    with pytest.raises(TypeError, match="not at the top of a module"):
        describe(make("Job", drafter=NoDrafter(), rewards={"a": lambda: 1}))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drafter=my_module.MyDrafter", "drafter.depth=0"], "drafter.depth=0: expected at least 1"),
        (
            ["drafter=my_module.MyDrafter", "drafter.inner={_target_: my_module.MyDrafter, depth: 0}"],
            "drafter.inner.depth=0: expected at least 1",
        ),
        (["task=running_sum", "task.difficulty=99"], "task.difficulty=99: expected 1 to 15 additions"),
    ],
)
def test_errors_of_constructors_name_the_setting(overrides: list[str], message: str) -> None:
    config = compose("main.yaml", overrides)
    with pytest.raises(ConfigError) as caught:
        instantiate(config.job)
    assert str(caught.value) == message


def test_a_node_of_a_config_knows_its_key() -> None:
    config = OmegaConf.create({"outer": {"several": [{"_target_": "my_module.MyFan", "width": 3}]}})
    with pytest.raises(ConfigError, match=r"^outer\.several\.0\.width=3: expected at most 2$"):
        instantiate(config.outer.several[0])


def test_a_component_does_not_know_where_it_stands() -> None:
    MyFan = import_target("my_module.MyFan", setting="")  # noqa: N806 - a class
    with pytest.raises(ValueError, match="^width=3: expected at most 2$"):
        MyFan(width=3)
    with pytest.raises(ConfigError, match="^module.drafter.width=3: expected at most 2$"):
        instantiate({"_target_": "my_module.MyFan", "width": 3}, key="module.drafter")
    alone = OmegaConf.create({"_target_": "my_module.MyFan", "width": 3})
    with pytest.raises(ConfigError, match="^drafter.width=3: expected at most 2$"):
        instantiate(alone, key="drafter")
    with pytest.raises(ConfigError, match="^width=3: expected at most 2$"):
        construct(MyFan, {"width": 3}, key="")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": "${limit}"}, "limit=3: expected at most 2"),
        ({"width": "${other}"}, "limit=3: expected at most 2"),
        ({"widths": "${limits}"}, "limits.top=3: expected at most 2"),
        ({"widths": {"low": "${limit}"}}, "fan.widths.low=3: expected at most 2"),
        ({"width": "${wrong}"}, "wrong='x': expected int"),
    ],
)
def test_an_argument_that_is_a_link_is_named_by_the_setting_that_it_links_to(
    settings: dict[str, Any], message: str
) -> None:
    values = {"limit": 3, "other": "${limit}", "limits": {"top": 3}, "wrong": "x"}
    config = OmegaConf.create({**values, "fan": {"_target_": "my_module.MyFan", **settings}})
    with pytest.raises(ConfigError) as caught:
        instantiate(config.fan)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 3}, "drafter.width=3: expected at most 2"),
        ({"widths": {"top": 3}}, "drafter.widths.top=3: expected at most 2"),
        ({"reason": "widths[1]=3: too wide"}, "drafter.widths[1]=3: too wide"),
        ({"reason": "widths: too many"}, "drafter.widths: too many"),
        ({"reason": "width is too much\nfor it"}, "drafter: width is too much for it"),
        ({"reason": "wid=3: too wide"}, "drafter: wid=3: too wide"),
        ({"reason": "other.width=3: too wide"}, "drafter: other.width=3: too wide"),
        ({"reason": "drafter.width=3: too wide"}, "drafter: drafter.width=3: too wide"),
    ],
)
def test_where_it_stands_is_put_before_what_its_constructor_says(settings: dict[str, Any], message: str) -> None:
    config = compose("main.yaml", ["drafter=my_module.MyFan"])
    with pytest.raises(ConfigError) as caught:
        instantiate({**config.drafter, **settings}, key="drafter")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": "x"}, "settings.count='x': expected int"),
        ({"cuont": 1}, "unknown setting settings.cuont; did you mean count?"),
    ],
)
def test_plain_nodes_are_checked_as_well(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        instantiate({"_target_": "my_module.Settings", **settings}, key="settings")
    assert str(caught.value) == message


def test_required_arguments(here: Path) -> None:
    (here / "mine.yaml").write_text("job: {_target_: my_module.Job}\n")
    config = compose("mine.yaml")
    assert "drafter: ???" in OmegaConf.to_yaml(config)
    with pytest.raises(ConfigError, match=r"^job\.drafter: required, but not set"):
        instantiate(config.job)


class Half(Scheduler):
    """Has nothing of what a scheduler has to have."""


def test_a_class_without_a_required_method_is_named_with_it() -> None:
    with pytest.raises(
        ConfigError, match=r"^scheduler=\S*test_components\.Half: it has no method `plan`, which is req"
    ):
        instantiate({"_target_": f"{__name__}.Half"}, key="scheduler")


def test_a_module_that_is_not_there_is_told_with_the_nearest_one(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"no module named 'my_modul', neither .*; did you mean my_module\?"):
        instantiate({"_target_": "my_modul.MyDrafter"}, key="drafter")


def test_an_object_of_another_kind_is_refused_by_the_setting() -> None:
    words = r"^drafter: expected a subclass of rhymerl\.Drafter, and RunningSum is none$"
    with pytest.raises(ConfigError, match=words):
        instantiate({"_target_": "rhymerl.tasks.RunningSum"}, key="drafter", kind=Drafter)
    with pytest.raises(ConfigError, match="^drafter: expected a subclass of .* and NoneType is none$"):
        instantiate(None, key="drafter", kind=Drafter)
    assert isinstance(instantiate(NoDrafter(), key="drafter", kind=Drafter), NoDrafter)


def test_arguments_whose_default_is_none_may_be_none() -> None:
    """As the config of a run writes them, also where the annotation does not say so."""
    config = compose("base", ["rewards={mine: {_target_: rhymerl.Reward, function: rhymerl.rewards.exact_match}}"])
    assert config.rewards.mine.name is None
    assert instantiate(config.rewards, key="rewards")["mine"].name == "exact_match"


def test_a_component_may_stand_under_a_name_with_a_dot() -> None:
    config = compose("base", ["rewards={a.b: {_target_: rhymerl.Reward, function: rhymerl.rewards.exact_match}}"])
    assert instantiate(config.rewards, key="rewards")["a.b"].weight == 1.0
