"""SmolLM2-135M-Instruct from its GGUF file: `make test-pretrained` fetches it and runs these."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rhymerl.config import compose
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.testing import OracleDrafter, RandomTreeDrafter
from tests.engine.test_lossless import answers, assert_same
from tests.pretrained.questions import QUESTIONS, asked, requests

pytestmark = pytest.mark.pretrained


@pytest.fixture(scope="module")
def path() -> str:
    found: str = compose("smollm2").model.path
    return found


@pytest.fixture(scope="module")
def policy(path: str) -> Policy:
    return PolicySource(path).load()


def test_it_is_what_its_card_says(policy: Policy) -> None:
    model, tokenizer = policy.model, policy.tokenizer
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rope_parameters["rope_theta"] == 100_000
    assert policy.context_tokens == 8192
    assert len(tokenizer) == 49_152
    assert tokenizer.convert_ids_to_tokens([*policy.stop_token_ids, tokenizer.pad_token_id]) == ["<|im_end|>"] * 2
    assert tokenizer.decode(asked(policy, "Hello")) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_logits_are_those_that_transformers_reads(policy: Policy, path: str) -> None:
    file = Path(path)
    own = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    for question in QUESTIONS:
        tokens = torch.tensor([asked(policy, question)])
        with torch.no_grad():
            assert torch.equal(policy.model(tokens).logits, own(tokens).logits)


def test_it_answers_in_sentences(policy: Policy) -> None:
    done = answers(policy, requests(policy, temperature=0.0), max_running=4)
    assert "Paris" in policy.tokenizer.decode(done["0/0"].token_ids)
    assert done["0/0"].finish_reason == "stop"


def test_drafts_change_no_token(path: str) -> None:
    policy = PolicySource(path, dtype="float64").load()
    asks = requests(policy, temperature=1.0)
    plain = answers(policy, asks, max_running=4)
    assert_same(plain, answers(policy, asks, drafter=RandomTreeDrafter(vocabulary=49_152), max_running=3))
    oracle = OracleDrafter({name: each.token_ids for name, each in plain.items()})
    drafted = answers(policy, asks, drafter=oracle, max_running=4)
    assert_same(plain, drafted)
    assert sum(each.num_passes for each in drafted.values()) < sum(each.num_passes for each in plain.values()) / 2


def test_it_is_saved_as_transformers_loads_it(policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template == policy.tokenizer.chat_template
    ids = asked(policy, QUESTIONS[0])
    assert asked(Policy(model=model, tokenizer=tokenizer), QUESTIONS[0]) == ids
    with torch.no_grad():
        np.testing.assert_array_equal(model(torch.tensor([ids])).logits, policy.model(torch.tensor([ids])).logits)
