"""A model that gets its weights late has those that it would have been loaded with, and the same buffers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rhymerl.models.deferred import Filler, FirstRankWeights, TensorFiles
from rhymerl.models.fingerprint import fingerprint
from rhymerl.models.lora import LoRA
from rhymerl.models.policy import PolicySource
from rhymerl.testing import tiny_policy
from tests.products import pairs_first

CPU = torch.device("cpu")
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "starcoder2": {},
}


def saved(folder: Path, family: str = "qwen2", *, max_shard_size: str = "20KB", **settings) -> Path:
    policy = tiny_policy(family, dtype="float32", **settings)
    policy.model.save_pretrained(folder, max_shard_size=max_shard_size)
    policy.tokenizer.save_pretrained(folder)
    return folder


def late(source: PolicySource):
    with torch.device("meta"):
        return source.load()


@pytest.mark.parametrize(
    ("adapter", "tied", "dtype"),
    pairs_first({"whole": None, "adapted": LoRA(rank=2)}, [False, True], ["float32", "bfloat16"]),
)
def test_filled_it_is_the_model_that_is_loaded(adapter, tied, dtype, tmp_path):
    source = PolicySource(str(saved(tmp_path, tied=tied)), dtype=dtype, adapter=adapter, seed=7)
    policy, expected = late(source), source.load()
    assert isinstance(policy.weights, TensorFiles)
    assert all(each.is_meta for name, each in policy.model.named_parameters() if ".lora_" not in name)
    filler = Filler(policy.model, policy.weights, CPU)
    for module in policy.model.modules():
        filler(module)
    assert filler.fingerprint() == fingerprint(policy.model) == fingerprint(expected.model)
    assert policy.stop_token_ids == expected.stop_token_ids
    assert policy.model.name_or_path == expected.model.name_or_path
    trained = [name for name, each in policy.model.named_parameters() if each.requires_grad]
    assert trained == [name for name, each in expected.model.named_parameters() if each.requires_grad]
    head, embeddings = policy.model.get_output_embeddings(), policy.model.get_input_embeddings()
    assert (head.weight is embeddings.weight) == tied


@pytest.mark.parametrize("tied", [False, True])
def test_cast_before_it_is_filled_it_is_the_loaded_model_cast(tied, tmp_path):
    source = PolicySource(str(saved(tmp_path, tied=tied)))
    policy, expected = late(source), source.load()
    filler = Filler(policy.model, policy.weights, CPU)
    policy.model.to(torch.bfloat16)
    head, embeddings = policy.model.get_output_embeddings(), policy.model.get_input_embeddings()
    assert (head.weight is embeddings.weight) == tied
    for module in policy.model.modules():
        filler(module)
    assert filler.fingerprint() == fingerprint(expected.model)
    for name, each in expected.model.bfloat16().state_dict().items():
        torch.testing.assert_close(policy.model.state_dict()[name], each, atol=0, rtol=0)  # of the same dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_that_no_file_has_are_there(family, tmp_path):
    source = PolicySource(str(saved(tmp_path, family, **FAMILIES[family])))
    policy, expected = late(source), source.load()
    buffers, others = dict(policy.model.named_buffers()), dict(expected.model.named_buffers())
    assert buffers.keys() == others.keys()
    assert all(torch.equal(buffers[name], each) for name, each in others.items())


def test_files_with_other_names_are_read_by_rank_0_alone(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    assert isinstance(late(PolicySource(str(saved(tmp_path, "qwen3_moe", **experts)))).weights, FirstRankWeights)
    assert isinstance(late(PolicySource(init={"model_type": "qwen2", "hidden_size": 32})).weights, FirstRankWeights)


def test_a_tensor_that_is_missing_is_no_match(tmp_path):
    path = saved(tmp_path, max_shard_size="1GB") / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    assert isinstance(late(PolicySource(str(tmp_path))).weights, FirstRankWeights)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "qwen2"
