"""A policy is written in files of bounded size, read as it is written, and plain transformers loads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rhymerl.models.exported import restore
from rhymerl.models.lora import LoRA
from rhymerl.models.policy import Policy
from rhymerl.testing import tiny_policy

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def policy_of(kind: str) -> Policy:
    if kind == "experts":  # which are one tensor in the model, and one each in its files
        return tiny_policy("qwen3_moe", dtype="float32", num_layers=4, **EXPERTS)
    policy = tiny_policy(dtype="float32", num_layers=4, tied=kind == "tied")
    if kind == "adapted":
        LoRA(rank=2).put_on(policy.model, seed=1)
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
    return policy


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()}


@pytest.mark.parametrize("kind", ["plain", "tied", "adapted", "experts"])
def test_several_files_hold_what_one_does(kind, tmp_path):
    policy = policy_of(kind)
    policy.save(tmp_path / "one")
    state = {name: each.detach().clone() for name, each in policy.model.state_dict().items()}
    asked: list[int] = []

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        asked.append(sum(state[name].nbytes for name in names))
        return {name: state[name] for name in names}

    shapes = {name: each.to("meta") for name, each in state.items()}
    layer = sum(each.nbytes for name, each in state.items() if name.startswith("model.layers.0."))
    restore(policy.files(), shapes, tmp_path / "several", read=read, file_bytes=layer)
    assert max(asked) <= layer
    assert len(asked) >= 5
    found, expected = tensors_in(tmp_path / "several"), tensors_in(tmp_path / "one")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    files = sorted(path.name for path in (tmp_path / "several").glob("*.safetensors"))
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in expected.values())
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "several")]
    one, several = (model(input_ids=torch.arange(9)[None]).logits for model in models)
    assert torch.equal(one, several)


def test_a_small_policy_is_one_file_without_an_index(tmp_path):
    policy = policy_of("plain")
    state = policy.model.state_dict()
    restore(policy.files(), state, tmp_path, read=lambda names: {name: state[name] for name in names})
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
