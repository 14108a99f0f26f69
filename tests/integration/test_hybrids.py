"""Hybrids are trained like other models: by `fit` with drafts, and killed and resumed to equal weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import Run, checkpoint
from tests.integration.test_resume import assert_same_runs, killed, words_for

_SIZES = "hidden_size: 32, intermediate_size: 64, num_attention_heads: 4, num_key_value_heads: 2"
_HEADS = "linear_num_value_heads: 4, linear_num_key_heads: 2, linear_key_head_dim: 8, linear_value_head_dim: 8"
_EXPERTS = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, shared_expert_intermediate_size: 16"
_LINEAR = f"{_SIZES}, {_HEADS}, head_dim: 8, num_hidden_layers: 2, layer_types: [linear_attention, full_attention]"
_MAMBA = "mamba_n_heads: 4, mamba_d_state: 8, mamba_d_head: 16, num_local_experts: 0, shared_intermediate_size: 32"
MODELS = {
    "lfm2": f"{_SIZES}, num_hidden_layers: 3, layer_types: [conv, full_attention, conv]",
    "qwen3_next": f"{_LINEAR}, {_EXPERTS}",
    "qwen3_5_text": _LINEAR,
    "granitemoehybrid": f"{_SIZES}, {_MAMBA}, num_hidden_layers: 2, layer_types: [linear_attention, full_attention]",
}


def of_model(settings: list[str], name: str) -> list[str]:
    model = f"model.init={{model_type: {name}, {MODELS[name]}, max_position_embeddings: 128}}"
    return [*(each for each in settings if not each.startswith("model.path")), "model.path=null", model]


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each.startswith("qwen3") else each for each in MODELS]
)
def test_fit_trains_them_with_drafts(name, settings, tmp_path, caplog, rhymerl: Run):
    words = [*of_model(settings, name), f"run_dir={tmp_path / 'run'}", "trainer.max_steps=4", "rollout.temperature=0.3"]
    done = rhymerl(*words)
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert checkpoint(tmp_path / "run")["rhymerl"]["num_rollouts"] == 2
    assert "whose prompts are computed for each answer" not in caplog.text
    assert summary["spec_accept_rate"] > 0


@pytest.mark.parametrize("name", [pytest.param("qwen3_5_text", marks=pytest.mark.slow), "qwen3_next"])
def test_killed_in_the_middle_of_a_step(name, settings, tmp_path, rhymerl: Run):
    words, whole, run = of_model(settings, name), tmp_path / "whole", tmp_path / "run"
    done = rhymerl(*words_for(words, whole))
    assert done.code == 0, done.err
    killed([*words_for(words, run), "algo={_target_: tests.integration.programs.DieInUpdate, call: 4}"], tmp_path)
    assert rhymerl(*words_for(words, run), "ckpt_path=last").code == 0
    assert_same_runs(Path(run), whole)
