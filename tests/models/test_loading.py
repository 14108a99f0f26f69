"""A model is read whole, or refused by the name of what its files lack: transformers would make that up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rhymerl.errors import ConfigError
from rhymerl.models.copies import twin_of
from rhymerl.models.critic import CriticSettings
from rhymerl.models.deferred import files_of
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.testing import tiny_policy
from tests.models.small import SMALL

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def saved(folder: Path, change: Change, **settings) -> str:
    """Write a tiny policy, its tensors changed."""
    tiny_policy(**settings).save(folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return str(folder)


def without(*names: str) -> Change:
    return lambda tensors: {name: each for name, each in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(WEIGHT), f"it has no weights for {WEIGHT}$"),
        (without(WEIGHT, "model.norm.weight"), f"it has no weights for {WEIGHT} and 1 others$"),
        (
            lambda tensors: {f"module.{name}": each for name, each in tensors.items()},
            r"it has no weights for lm_head\.weight and \d+ others; there is module\.lm_head\.weight, so remove the prefix",
        ),
    ],
    ids=["one", "two", "prefixed"],
)
def test_weights_that_are_missing_are_named(change, words, tmp_path):
    path = saved(tmp_path, change)
    with pytest.raises(ConfigError, match=rf"^model\.path='{path}': {words}"):
        PolicySource(path).load()
    with pytest.raises(ConfigError, match=r"^critic\.path"):
        CriticSettings(path=path).build(tiny_policy(), seed=0)


@pytest.mark.parametrize(("chosen", "dtype"), [("eager", "float32"), (None, "float32"), (None, "float64")])
def test_how_experts_are_computed_is_saved_where_it_was_chosen(chosen, dtype, tmp_path):
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": chosen}
    policy = PolicySource(init={**SMALL, "model_type": "mixtral", **experts}, dtype=dtype).load()
    way = policy.model.config._experts_implementation
    assert (way == "eager") == (chosen == "eager" or dtype == "float64")
    for name in ("once", "twice"):
        policy.save(tmp_path / name)
        assert ("experts_implementation" in (tmp_path / name / "config.json").read_text()) == (chosen is not None)
        policy = PolicySource(str(tmp_path / name), dtype=dtype).load()
        assert policy.model.config._experts_implementation == way
    twin = twin_of(policy)
    assert twin.model.config._experts_implementation == way
    assert twin.model(torch.arange(5)[None]).logits.isfinite().all()


def test_a_head_of_its_own_is_not_tied(tmp_path):
    """The policy would be trained with two matrices, and exported with one."""
    path = saved(tmp_path, lambda tensors: tensors)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    with pytest.raises(
        ConfigError, match=r"config ties head and embedding .* another matrix for each; set it to false"
    ):
        PolicySource(path).load()
    outline = PolicySource(path).outline()
    assert files_of(path, outline, is_here=True) is None, "ranks would each read the embedding alone"


def test_a_head_that_is_there_twice_is_tied(tmp_path):
    """Some tools write the embedding under both names."""

    def doubled(tensors):
        return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    model = PolicySource(saved(tmp_path, doubled, tied=True)).load().model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tiny_policy(tied=True).model.lm_head.weight.float())


@pytest.mark.parametrize(("special", "stops"), [([], ()), (["</s>"], (2,))])
def test_an_end_that_only_a_class_of_configs_has_by_default_counts_as_a_special_token(special, stops):
    """Llama's is 2, which is any letter of most tokenizers."""
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    config = LlamaConfig(vocab_size=3, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    policy = Policy(model=LlamaForCausalLM(config), tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend))
    policy.model.generation_config.eos_token_id = None
    assert config.eos_token_id == 2
    assert policy.stop_token_ids == stops
    config.eos_token_id = 1
    assert policy.stop_token_ids == (1,)
    policy.model.generation_config.eos_token_id = [0]
    assert policy.stop_token_ids == (0, 1)
