"""Where workers live, how many there are and what they do during the update changes no token and no weight."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rhymerl.history.traces import read_trace
from tests.integration.test_episodes_rerendered import TEMPLATE
from tests.ray.commands import ROOT, answers, fit, furthest, one_process, temporary, weights

pytestmark = pytest.mark.ray
EPISODES = ["task=checked_sum", "task.train_size=12", "task.validation_size=4", "rollout.max_turns=3"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    one_process(run_dir)
    yield run_dir
    shutil.rmtree(temporary(run_dir.parent))


@pytest.mark.parametrize("scheduler", ["fifo", "sorted", "histopipe", "packed", "paced"])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("run_ahead", ["'off'", "draft", "auto"])
def test_tokens_and_weights_are_those_of_one_process(run_ahead, workers, scheduler, alone, tmp_path):
    if workers != 2 and (run_ahead == "auto" or scheduler in ("sorted", "packed", "paced")):
        pytest.skip("two workers stand for the others")
    fit(tmp_path / "run", f"run_ahead={run_ahead}", f"workers={workers}", f"scheduler={scheduler}")
    assert answers(tmp_path / "run") == answers(alone)
    assert furthest(weights(tmp_path / "run"), weights(alone)) < 1e-9


@pytest.fixture(scope="module")
def episodes_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    run_dir = tmp_path_factory.mktemp("episodes") / "run"
    one_process(run_dir, *EPISODES)
    yield run_dir
    shutil.rmtree(temporary(run_dir.parent))


@pytest.mark.parametrize(
    ("workers", "run_ahead", "scheduler"),
    [(1, "'off'", "fifo"), (2, "'off'", "histopipe"), (2, "draft", "sorted"), (4, "draft", "paced")],
)
def test_episodes_are_those_of_one_process(workers, run_ahead, scheduler, episodes_alone, tmp_path):
    parts = [f"run_ahead={run_ahead}", f"workers={workers}", f"scheduler={scheduler}"]
    fit(tmp_path / "run", *EPISODES, *parts)
    assert answers(tmp_path / "run") == answers(episodes_alone)
    assert furthest(weights(tmp_path / "run"), weights(episodes_alone)) < 1e-9


def test_what_truncation_left_travels_with_episodes_that_are_rendered_anew(tmp_path):
    """Without it the update would train other weights."""
    model = shutil.copytree(ROOT / "rhymerl" / "assets" / "quickstart_policy", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    settings = [
        f"model.path={model}",
        "environment=tests.environments.worlds.Counts",
        "data.system_prompt='0'",  # which makes messages of the task's texts
        "rollout.history=rerender",
        "rollout.max_turns=3",
        "rollout.top_p=0.9",
        "rewards={digits: tests.integration.rewards.digits}",
        "trainer.max_steps=2",
    ]
    one_process(tmp_path / "alone", *settings)
    fit(tmp_path / "run", "run_ahead=draft", "workers=2", "scheduler=histopipe", *settings)
    assert answers(tmp_path / "run") == answers(tmp_path / "alone")
    assert furthest(weights(tmp_path / "run"), weights(tmp_path / "alone")) < 1e-9
    records = list(read_trace(tmp_path / "run" / "rollouts.jsonl.gz"))
    assert any(record.parts is not None for record in records)
    assert len({record.reward for record in records}) > 1, "there is something to learn"


@pytest.mark.parametrize("workers", [1, 4])
def test_kept_tokens_are_within_the_bound(workers, tmp_path):
    """A token that is older ends the run."""
    fit(tmp_path / "run", "run_ahead=keep", f"workers={workers}", "scheduler=histopipe")
    assert len(answers(tmp_path / "run")) == 6 * 16


@pytest.mark.parametrize("run_ahead", ["'off'", "draft"])
def test_a_deterministic_run_repeats_bit_for_bit(run_ahead, tmp_path):
    for name in ("one", "two"):
        fit(
            tmp_path / name,
            "deterministic=true",
            f"run_ahead={run_ahead}",
            "model.dtype=float32",
            "trainer.precision=32-true",
            "scheduler=histopipe",
        )
    assert answers(tmp_path / "one") == answers(tmp_path / "two")
    assert furthest(weights(tmp_path / "one"), weights(tmp_path / "two")) == 0.0


def test_adapters_give_workers_the_weights_that_one_process_has(tmp_path):
    """The base goes out once, and then the adapters alone."""
    adapter = ["adapter=lora", "adapter.rank=4", "trainer.max_steps=4"]
    one_process(tmp_path / "alone", *adapter)
    fit(tmp_path / "run", "run_ahead=draft", "workers=2", *adapter)
    assert answers(tmp_path / "run") == answers(tmp_path / "alone")
    assert furthest(weights(tmp_path / "run"), weights(tmp_path / "alone")) < 1e-9


def test_the_experts_of_sampling_travel_with_answers(tmp_path):
    """The update's routers choose what those of the workers have chosen with the same weights; here in float32."""
    sizes = "hidden_size: 32, moe_intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 4, head_dim: 8"
    experts = "num_experts: 8, num_experts_per_tok: 2, num_key_value_heads: 2, initializer_range: 0.3"
    model = f"model.init={{model_type: qwen3_moe, {sizes}, {experts}, max_position_embeddings: 128}}"
    words = ["model.path=null", model, "model.dtype=float32", "trainer.precision=32-true"]
    words += ["run_ahead=draft", "workers=2", "scheduler=histopipe"]
    fit(tmp_path / "run", *words, "update.router_replay=true", "trainer.max_steps=4", "update.learning_rate=1e-2")
    with gzip.open(tmp_path / "run" / "steps.jsonl.gz", "rt") as file:
        steps = [json.loads(line)["metrics"] for line in file]
    found = [each["sampling/routed_otherwise_frac"] for each in steps]
    print(found)
    assert len(found) == 4
    assert max(found) < 0.005, (
        "rounding decides few close choices, and misplaced routes would be others for most tokens"
    )
