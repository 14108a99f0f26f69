"""Every YAML in configs/ composes, and its components can be built as far as they need no model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rhymerl.config import compose, describe, instantiate, packaged_names, resolved
from rhymerl.config.files import packaged_directory
from tests.config.packaged import composed

ROOT = Path(__file__).parents[2]
OPTIONS = sorted(packaged_directory().glob("*/*.yaml"))
DRAFTING = [path for path in OPTIONS if path.parent.name in ("drafter", "budget")]
NEEDS_EXTRA = {"openenv", "reasoning_gym", "verifiers", "wandb"}


@pytest.mark.parametrize("name", packaged_names())
def test_primary_configs(name: str) -> None:
    config = composed(name)
    if ".reasoning_gym." in str(config.get("task")):
        pytest.importorskip("reasoning_gym")
    for section in (
        *("task", "algo", "drafter", "budget", "scheduler", "backend"),
        *("history", "rollout", "update", "evaluation"),
    ):
        if config.get(section) is not None:
            component = instantiate(config[section])
            assert describe(instantiate(describe(component))) == describe(component)


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_options_of_groups(path: Path) -> None:
    group = path.parent.name
    config = compose("base", [f"{group}={path.stem}"])
    assert resolved(config)[group]["_target_"]
    if path.stem not in NEEDS_EXTRA:
        instantiate(config[group])


@pytest.mark.parametrize("name", ["replay", "rollout"])
@pytest.mark.parametrize("path", DRAFTING, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_drafters_and_budgets_go_with_every_command_that_drafts(name: str, path: Path) -> None:
    group = path.parent.name
    instantiate(compose(name, [f"{group}={path.stem}"])[group])


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_reaches_what_would_depend_on_the_clock(deterministic: bool) -> None:
    overrides = [f"deterministic={str(deterministic).lower()}", "budget=goodput"]
    for drafter in ("history_tree", "paper"):
        config = resolved(compose("base", [*overrides, f"drafter={drafter}"]))
        assert [config[group]["deterministic"] for group in ("drafter", "budget")] == [deterministic] * 2
        assert config["module"]["drafter"] == config["drafter"]
        assert config["module"]["budget"] == config["budget"]


def test_what_the_paper_says() -> None:
    """arXiv 2508.18588 has suffixes of 3 to 7 tokens in the last epoch's answers, and only the best rewarded branch."""
    drafter, budget = (
        describe(instantiate(compose("base", ["drafter=paper", "budget=aimd"])[group]))
        for group in ("drafter", "budget")
    )
    said = {"window": 1, "min_match": 3, "max_match": 7, "max_branches": 1, "priority": "reward", "own": False}
    assert drafter.items() >= said.items()
    assert budget.items() >= {"start": 2, "increase": 2}.items()


def test_a_logger_of_ones_choice() -> None:
    words = ["trainer.logger=lightning.pytorch.loggers.CSVLogger", "trainer.logger.save_dir=logs"]
    logger = compose("quickstart", words).trainer.logger
    assert (logger._target_, logger.save_dir) == ("lightning.pytorch.loggers.CSVLogger", "logs")


def test_a_trainer_flag_reaches_the_trainer() -> None:
    config = compose(
        "base", ["trainer.max_steps=7", "trainer.devices=1", "trainer.logger=false", "trainer.accelerator=cpu"]
    )
    trainer = instantiate(config.trainer)
    assert (trainer.max_steps, trainer.num_devices) == (7, 1)


def test_the_warm_start_of_the_shipped_policy() -> None:
    """Running `rhymerl warmstart` gives the policy that comes with the package."""
    config = resolved(compose("warmstart_running_sum"))
    settings = config["warmstart"]
    names = ("num_steps", "batch_size", "learning_rate", "warmup_steps", "save_every", "seed")
    assert [settings[name] for name in names] == [10_000, 32, 2e-3, 200, 500, 0]
    assert (config["task"]["difficulty"], config["task"]["error_rate"]) == (7, 0.2)
    assert config["model"]["init"] == {
        "model_type": "qwen2",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }


def test_the_pretrained_model_is_the_file_that_make_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"^pretrained := \$\(packages\)/(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    path = tmp_path / found[1]
    path.parent.mkdir()
    path.touch()
    monkeypatch.setenv("RHYMERL_PACKAGES", str(tmp_path))
    assert compose("smollm2").model.path == str(path)


def test_additions_that_are_held_out_are_not_trained_on() -> None:
    task = instantiate(composed("smollm2").task)
    train, held_out = ({row["prompt"][-1]["content"] for row in task.rows(split)} for split in ("train", "validation"))
    assert len(held_out) >= 40
    assert train.isdisjoint(held_out)
