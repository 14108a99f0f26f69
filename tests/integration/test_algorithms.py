"""PPO, and every switch of rollout and update, train three steps from the command line."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from rhymerl.testing import tiny_policy
from tests.integration.conftest import checkpoint

SWITCHES = [
    "rollout.dynamic_sampling=2",
    "update.epochs=2",
    "update.activation_checkpointing=true",
    pytest.param("adapter=lora", marks=pytest.mark.slow),  # test_adapters.py trains them, too
]


@pytest.mark.parametrize("words", SWITCHES)
def test_three_steps(words, settings, tmp_path, rhymerl):
    steps = 12 if words == "update.epochs=2" else 6  # two mini-batches an epoch
    done = rhymerl(*settings, words, f"trainer.max_steps={steps}", f"run_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert result["steps"] == 3
    assert math.isfinite(result["reward_last"])
    assert checkpoint(tmp_path / "run")["rhymerl"]["num_rollouts"] == 3


def test_a_model_with_more_rows_than_its_tokenizer_has_tokens(settings, tmp_path, rhymerl):
    """As Qwen's have, for the sake of matrices whose sizes are powers of two."""
    made = tiny_policy(dtype="float32", context=128, peaked=2.0, vocab_size=64)
    replace(made, tokenizer=tiny_policy().tokenizer).save(tmp_path / "model")
    more = [f"model.path={tmp_path / 'model'}", "trainer.max_steps=4", "record_rollouts=true"]
    done = rhymerl(*settings, *more, f"run_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    with gzip.open(tmp_path / "run" / "rollouts.jsonl.gz", "rt") as recorded:
        tokens = {token for line in recorded for token in json.loads(line)["response_tokens"]}
    assert len(tokens) > 5
    assert max(tokens) < len(AutoTokenizer.from_pretrained(tmp_path / "model"))


@pytest.mark.parametrize(
    "name",
    [
        "ppo_quickstart",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("dapo_quickstart", "quickstart_lora")),
    ],
)
def test_packaged_configs_train_three_steps(name, settings, tmp_path, rhymerl):
    words = [word for word in settings if not word.startswith(("--config", "update.mini_batches"))]
    steps = 6 if name == "ppo_quickstart" else 3
    done = rhymerl(*words, f"--config={name}", f"trainer.max_steps={steps}", f"run_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3


def test_programs_are_run_and_learned_from(model_dir, tmp_path, rhymerl):
    """A random answer of digits and signs is mostly a program; one that ends in the middle of a sum is none."""
    data = tmp_path / "programs.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+{i}=?\n", "tests": "assert True"}) + "\n" for i in range(4)))
    words = ["rollout.group_size=6", "rollout.max_tokens=3", "data.prompts_per_step=2", "trainer.max_steps=3"]
    words += [
        "update.learning_rate=1e-2",
        "drafter=none",
        "trainer.accelerator=cpu",
        "module.reward_workers=2",
        "record_rollouts=true",
    ]
    words += ["rewards.code.arguments.unsafe_without=[namespaces,seccomp,process_limit]", f"run_dir={tmp_path / 'run'}"]
    done = rhymerl("fit", "--config=grpo_code", f"model.path={model_dir}", f"data.train={data}", *words)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
    with gzip.open(tmp_path / "run" / "rollouts.jsonl.gz", "rt") as recorded:
        rewards = [json.loads(line)["reward"] for line in recorded]
    assert len(rewards) == 36
    assert set(rewards) == {0.0, 1.0}
