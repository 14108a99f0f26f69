"""A model with more rows than its tokenizer has tokens: the others are never sampled, and no log-prob knows of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from rhymerl.budgets import FixedBudget
from rhymerl.engine.engine import Engine
from rhymerl.engine.support import prove_engine
from rhymerl.models.logits import num_tokens
from rhymerl.models.logprobs import policy_output, token_batch, token_logprobs
from rhymerl.models.policy import Policy
from rhymerl.models.proof import prove_update
from rhymerl.testing import RandomTreeDrafter, make_requests, tiny_policy
from rhymerl.types import Completion, Sample
from tests.products import values_first

TOKENS, ROWS = 19, 64
MODELS = {
    "direct": {},
    "tied": {"tied": True},
    "compiled": {"dtype": "float32"},
    "by transformers, scaled": {"model_type": "granite", "logits_scaling": 2.0},
}
SAMPLING = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "top-k beyond the tokenizer": {"top_k": 40, "temperature": 0.7},
    "top-p": {"top_p": 0.9},
}


def padded(**settings: object) -> Policy:
    """Return a policy whose tokenizer has fewer tokens than its model, as it is read from many a hub's directory."""
    policy = tiny_policy(**{"vocab_size": ROWS, "peaked": 2.0, **settings})
    assert num_tokens(policy.model) == ROWS, "one that is made has a token for each row"
    return replace(policy, tokenizer=tiny_policy().tokenizer)


def answers(policy: Policy, **sampling: object) -> list[Completion]:
    engine = Engine(policy.model, drafter=RandomTreeDrafter(vocabulary=ROWS), budget=FixedBudget(6), check_drafts=True)
    engine.submit(make_requests(4, group_size=4, max_tokens=16, **sampling))
    found = []
    while engine.has_work:
        found += engine.run()
    return found


def sample_of(completion: Completion) -> Sample:
    mask = np.ones(len(completion.output), np.bool_)
    return Sample(completion=completion, text="", reward=0.0, rewards={}, loss_mask=mask)


def expected_logprobs(policy: Policy, completion: Completion, temperature: float) -> torch.Tensor:
    prompt, tokens = completion.request.prompt.token_ids.tolist(), torch.tensor(completion.output.token_ids.tolist())
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[*prompt, *tokens.tolist()]])).logits[0, len(prompt) - 1 : -1]
    return (logits[:, :TOKENS].double() / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


@pytest.mark.parametrize(("model", "sampling"), values_first(MODELS, SAMPLING))
def test_only_tokens_of_the_tokenizer_are_sampled_and_share_the_probability(model, sampling):
    policy = padded(**model)
    prove_update(policy.model)
    prove_engine(policy.model)
    assert num_tokens(policy.model) == TOKENS
    completions = answers(policy, **sampling)
    assert sum(len(each.output) for each in completions) > 60
    for each in completions:
        assert each.output.token_ids.max() < TOKENS
        expected = expected_logprobs(policy, each, sampling.get("temperature") or 1.0)
        assert_close(torch.from_numpy(each.output.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_update_computes_the_same_log_probs_and_no_gradient_for_the_other_rows(model):
    policy = padded(**{**model, "dtype": "float64"})
    completions = answers(policy, stop_token_ids=())
    batch = token_batch([sample_of(each) for each in completions], "cpu")
    found = policy_output(policy.model, batch, temperature=1.0)
    alone = token_logprobs(policy.model, batch, temperature=1.0)
    for each, line, other in zip(completions, found.logprobs, alone, strict=True):
        expected = expected_logprobs(policy, each, 1.0)
        assert_close(line.detach(), expected, atol=1e-10, rtol=0)
        assert_close(other, expected, atol=1e-10, rtol=0)
    assert float(found.entropy.max()) <= torch.tensor(TOKENS).log()
    found.logprobs.sum().backward()
    gradient = policy.model.get_output_embeddings().weight.grad
    assert gradient.shape == (ROWS, 32)
    assert gradient[:TOKENS].abs().max() > 0
    assert not gradient[TOKENS:].any()
