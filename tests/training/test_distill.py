"""The divergence from a teacher over the whole vocabulary, and updates that bring a policy nearer to it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from rhymerl.algos import Distill
from rhymerl.models.logprobs import policy_output, token_batch
from rhymerl.models.shared_prefixes import sharing
from rhymerl.replayed import KeptSets
from rhymerl.testing import tiny_policy
from rhymerl.types import Sample
from tests.training.updates import norm_in_double, run_update, scored

FORMS = pytest.mark.parametrize("over", ["sampled", "vocabulary"])
TEMPERATURE = 0.9


@pytest.fixture(autouse=True)
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' norms go through float32."""
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_double)


def teacher_of(seed: int = 5, **settings) -> PreTrainedModel:
    """Return a wider model of other weights."""
    return tiny_policy(seed=seed, hidden_size=24, num_attention_heads=2, num_key_value_heads=2, **settings).model


def log_softmax(model: PreTrainedModel, sample: Sample) -> Tensor:
    """Return transformers' own log-probs of all tokens at each position of an answer, [L, V]."""
    ids = np.concatenate([sample.prompt.token_ids, sample.completion.token_ids]).astype(np.int64)
    logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0, len(sample.prompt.token_ids) - 1 : -1]
    logprobs: Tensor = (logits / TEMPERATURE).log_softmax(-1)
    return logprobs


def plain_divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 5, None])
def test_the_divergence_and_its_gradient_are_those_of_whole_logits(chunk_tokens, shares):
    model, teacher, samples = tiny_policy().model, teacher_of().requires_grad_(False), scored(8, alike=True)
    expected = torch.cat([plain_divergence(log_softmax(model, s), log_softmax(teacher, s)) for s in samples])
    weights = torch.linspace(0.5, 2, len(expected), dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), list(model.parameters()))
    with sharing([model, teacher]) if shares else nullcontext():
        batch = token_batch(samples, "cpu", shares=shares)
        output = policy_output(model, batch, temperature=TEMPERATURE, chunk_tokens=chunk_tokens, reference=teacher)
        found = output.divergence[batch.response]
        gradient = torch.autograd.grad((found * weights).sum(), list(model.parameters()))
        plain = policy_output(model, batch, temperature=TEMPERATURE, chunk_tokens=chunk_tokens)
    assert expected.min() > 0.001
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for one, other in zip(gradient, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(output.logprobs, plain.logprobs, rtol=1e-12, atol=1e-12)
    assert plain.divergence is None


def test_where_truncation_left_some_tokens_both_are_normalised_over_these():
    model, teacher, sample = tiny_policy().model, teacher_of(), scored(1)[0]
    source = np.random.default_rng(0)
    tokens = sample.completion.token_ids
    sets = [np.unique([token, *source.integers(0, 19, 4)]).astype(np.int32) for token in tokens]
    sets[0] = sets[0][:0]  # all tokens
    output = replace(sample.completion.output, kept=KeptSets.of(sets, np.zeros(len(sets))))
    given = replace(sample, completion=replace(sample.completion, output=output))
    found = policy_output(model, token_batch([given], "cpu"), temperature=TEMPERATURE, reference=teacher)
    p, q = log_softmax(model, sample), log_softmax(teacher, sample)
    for t, left in enumerate(sets):
        chosen = torch.from_numpy(left.astype(np.int64)) if len(left) else torch.arange(p.shape[1])
        expected = plain_divergence(p[t, chosen].log_softmax(-1), q[t, chosen].log_softmax(-1))
        assert float(found.divergence[0, t].detach()) == pytest.approx(float(expected.detach()), rel=1e-9)
    found.divergence.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@FORMS
def test_neither_micro_batches_nor_shared_prompts_change_the_update(over):
    samples, teacher = scored(12, alike=True), teacher_of()

    def weights(**settings) -> Tensor:
        trained, _ = run_update(samples, algorithm=lambda: Distill(over=over), teacher=teacher, **settings)
        return torch.cat([p.detach().flatten() for p in trained.parameters()])

    whole = weights()
    for settings in ({"micro_batch_tokens": 60}, {"shares_prefixes": True}, {"chunk_tokens": 3}):
        torch.testing.assert_close(weights(**settings), whole, rtol=0, atol=1e-9)


def test_steps_bring_the_policy_nearer_to_the_teacher_and_rewards_do_not_matter():
    samples, teacher = scored(12), teacher_of()
    kinds = {steps: run_update(samples, algorithm=by_vocabulary, teacher=teacher, steps=steps)[1] for steps in (1, 20)}
    assert kinds[20]["kl"] < 0.9 * kinds[1]["kl"]
    others = [replace(sample, reward=float("nan")) for sample in samples]
    _, metrics = run_update(others, algorithm=by_vocabulary, teacher=teacher)
    assert metrics["kl"] == kinds[1]["kl"]
    assert metrics["grad_norm"] > 0


def by_vocabulary() -> Distill:
    return Distill(over="vocabulary")


@FORMS
def test_a_teacher_that_is_the_policy_moves_nothing(over):
    _, metrics = run_update(scored(8), algorithm=lambda: Distill(over=over))
    assert metrics["kl"] == pytest.approx(0, abs=1e-12)
    assert metrics["grad_norm"] == pytest.approx(0, abs=1e-12)
