"""`rhymerl explain` and `rhymerl configs`: what they say is what constructors and files say."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rhymerl.cli import main
from rhymerl.cli.kinds import kind_of
from rhymerl.config import compose, packaged_names, resolved
from rhymerl.config.explain import Explanation, _said_of, comments_of, explain
from rhymerl.config.files import about, groups, locate, packaged_directory
from rhymerl.config.other_names import NAMES
from rhymerl.config.schema import classes
from rhymerl.config.tree import ABSENT, find
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.errors import ConfigError
from tests.documents import ROOT, table_after

COMING_FROM = ROOT / "docs" / "coming_from.md"


class Wordless(HistoryTreeDrafter):
    """A drafter."""

    def __init__(self, *, size: int = 1) -> None:
        super().__init__()
        self.size = size


def explained(key: str, config: str = "base", *overrides: str) -> Explanation:
    return explain(compose(config, overrides), key, config, overrides)


def test_an_argument_has_its_constructors_type_default_and_docstring() -> None:
    found = explained("drafter.max_branches")
    parameter = inspect.signature(HistoryTreeDrafter).parameters["max_branches"]
    assert (found.type, found.default, found.value) == ("int or null", parameter.default, None)
    assert found.owner == "rhymerl.drafters.HistoryTreeDrafter"
    assert found.about == (
        "The most probable nodes are taken first, at most `max_branches` below one (1 = a chain), "
        "chosen by probability or by the summed `reward` of the answers below."
    )
    words = explained("drafter.size", "base", f"drafter={__name__}.Wordless").about
    assert words == inspect.getdoc(Wordless)  # whose sentences do not name it


def test_a_field_has_the_comment_beside_it_also_that_of_a_class_it_comes_from() -> None:
    assert explained("algo.kl_coef").about == "of the divergence from the policy that the run started from"


@pytest.mark.parametrize(
    ("key", "config", "overrides", "value", "set_in"),
    [
        ("update.learning_rate", "quickstart", [], 3e-4, "configs/quickstart.yaml"),
        ("update.learning_rate", "quickstart", ["update.learning_rate=1e-3"], 1e-3, "the command line"),
        ("update.learning_rate", "base", [], 1e-6, "the constructor's default"),
        ("drafter.priority", "base", ["drafter=paper"], "reward", "configs/drafter/paper.yaml"),
        ("drafter", "base", ["drafter=paper"], None, "the command line"),
        ("scheduler", "quickstart_histopipe", [], None, "configs/quickstart_histopipe.yaml"),
        ("budget.costs", "quickstart", ["budget=goodput"], None, "the constructor's default"),
        ("module.drafter.window", "base", ["drafter.window=3"], 3, "the command line"),
        ("module.seed", "base", ["seed=3"], 3, "the command line"),
    ],
)
def test_where_a_value_was_set(key: str, config: str, overrides: list[str], value: object, set_in: str) -> None:
    found = explained(key, config, *overrides)
    assert found.set_in == set_in
    if value is not None or key == "budget.costs":
        assert found.value == value


def test_a_value_in_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [quickstart, _self_]\nupdate:\n  epochs: 2 # because it helps\nseed: 1 # my own\n")
    found = explained("update.epochs", str(path))
    assert (found.value, found.set_in) == (2, str(path))
    assert explained("seed", str(path)).about == "my own"
    assert found.about == (
        "because it helps\n\nA step's samples make `mini_batches` optimizer steps in each of `epochs` passes over them."
    )


def test_a_setting_that_others_follow() -> None:
    found = explained("seed")
    assert [*found.followed_by] == ["model.seed", "data.seed", "module.seed"]
    assert (found.type, found.owner) == ("int", None)
    assert found.about == comments_of(locate("base").read_text())["seed"]


def test_a_flag_of_a_class_that_lists_its_arguments() -> None:
    about = explained("trainer.precision").about
    assert about.startswith("Double precision")
    assert "accelerator" not in about


def test_a_section_lists_its_settings_and_options() -> None:
    found = explained("drafter")
    assert [*found.options] == ["history_tree", "ngram", "none", "paper"]
    assert set(found.settings) == set(inspect.signature(HistoryTreeDrafter).parameters)
    assert found.settings["window"].startswith("8 (int)")
    assert explained("algo").settings["kl_coef"] == (
        "0.0 (float): of the divergence from the policy that the run started from"
    )
    assert set(explained("checkpoint").settings) == set(resolved(compose("base"))["checkpoint"])


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("update.learnin_rate", "unknown setting update.learnin_rate; did you mean update.learning_rate?"),
        ("mini_batches", "did you mean update.mini_batches?"),
        ("budget.start", "budget.start: GoodputBudget has no such setting; budget=aimd has it"),
        (
            "task.difficulty",
            "task=null has no such setting; task=checked_sum or task=long_sum or task=running_sum has it",
        ),
    ],
)
def test_an_unknown_setting_leads_to_the_nearest_one(key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explained(key)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["num_generations", "actor_rollout_ref.rollout.n", "rollout.n"])
def test_a_name_of_another_project_is_that_of_the_setting_here(key: str) -> None:
    found = explained(key)
    assert found.key == "rollout.group_size"
    assert [*found.elsewhere] == ["num_generations (TRL)", "actor_rollout_ref.rollout.n (verl)"]
    with pytest.raises(ConfigError, match=f"unknown setting {key}; it is rollout.group_size here"):
        compose("base", [f"{key}=4"])


def test_names_of_other_projects_are_those_of_the_documentation() -> None:
    config = resolved(compose("base"))
    rows = [[set(re.findall(r"`([^`]+)`", cell)) for cell in row] for row in table_after(COMING_FROM, "## Settings")]
    for column in range(2):
        names = {each[column]: ours for ours, each in NAMES.items() if each[column] is not None}
        for theirs, ours in names.items():
            assert any(theirs in row[column] and ours in {each.partition("=")[0] for each in row[-1]} for row in rows)
        for row in rows:
            is_pair = len(row[column]) == len(row[-1]) == 1 and "=" not in "".join(row[column] | row[-1])
            if is_pair and find(config, theirs := min(row[column])) is ABSENT:
                assert {names.get(theirs)} == row[-1], theirs


def test_names_of_other_projects_are_none_of_ours() -> None:
    config = resolved(compose("base", ["backend=sglang"]))
    assert [name for names in NAMES.values() for name in names if name and find(config, name) is not ABSENT] == []
    assert [ours for ours in NAMES if explained(ours, "base", "backend=sglang").key != ours] == []


def test_every_setting_of_a_run_can_be_explained() -> None:
    config = compose("quickstart")
    pending = [name for name in resolved(config) if name != "trainer"]
    for key in pending:
        found = explain(config, key, "quickstart")
        pending += [f"{key}.{name}" for name in found.settings if f"{key}.{name}".count(".") == 1]
        assert found.type or found.settings or found.about or "." in found.key, key
    assert "rollout.min_p" in pending


def test_every_setting_says_what_it_is_for() -> None:
    """But those of Lightning, and the module's, which are links to others."""
    config: Any = OmegaConf.to_container(compose("base"))
    owners = [owner for owner in classes(config) if owner.key != "module" and not owner.key.startswith("trainer")]
    said = comments_of(locate("base").read_text())
    keys = [(owner, name, f"{owner.key}.{name}") for owner in owners for name in owner.signature.parameters]
    assert [key for owner, name, key in keys if key not in said and not _said_of(owner.target, name)] == []
    assert len(keys) > 80


def test_the_command_fits_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", "rollout.temperature=0.5", "rollout.temperature", "--config", "quickstart"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "setting     rollout.temperature",
        "value       0.5",
        "type        float",
        "default     1.0",
    ]
    assert main(["configs"]) == 0
    assert all(len(line) <= 80 for line in [*lines, *capsys.readouterr().out.splitlines()])


def test_configs_lists_every_packaged_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    names = {name: command for command, rows in listed["configs"].items() for name in rows}
    assert names == {name: kind_of(locate(name)) for name in packaged_names()}
    assert {group: [*rows] for group, rows in listed["groups"].items()} == groups()
    assert set(groups()) == {path.name for path in packaged_directory().iterdir() if path.is_dir()}


@pytest.mark.parametrize("path", sorted(packaged_directory().rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_packaged_file_says_what_it_is(path: Path) -> None:
    words = about(path)
    assert words
    assert "rhymerl fit" not in words


def test_explain_needs_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 2
    assert "rhymerl explain needs SETTING" in capsys.readouterr().err
