"""Distillation: advantages and losses once more in NumPy, finite differences, and what it needs of a run."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rhymerl.algos import GRPO, Batch, Distill, PolicyOutput
from tests.algos.batches import NUM_SAMPLES, WIDTH, make_batch, output_of, rows, tensor, totals_of
from tests.algos.twin import plain_group_advantages

TOKENS = 7
MEANS = ("token", "sequence", "constant")


def random_case(seed: int) -> tuple[Batch, Tensor]:
    """A batch with rewards and masks of its own, some behaviour log-probs of which are broken."""
    source = np.random.default_rng(seed)
    batch, logprobs = make_batch(seed)
    mask = torch.from_numpy(source.random((NUM_SAMPLES, WIDTH)) < 0.8)
    batch.behaviour_logprobs[torch.from_numpy(source.random((NUM_SAMPLES, WIDTH)) < 0.05)] = -math.inf
    return replace(batch, mask=mask, groups=torch.from_numpy(source.integers(0, 3, NUM_SAMPLES))), logprobs


def twin_advantages(algorithm: Distill, batch: Batch) -> np.ndarray:
    """Teacher over policy before the update, in logarithms; beside it what rewards say."""
    counts = batch.mask.numpy() & np.isfinite(batch.behaviour_logprobs.numpy())
    gap = np.where(counts, batch.reference_logprobs.numpy() - batch.proximal_logprobs.numpy(), 0.0)
    of_rewards = plain_group_advantages(batch.rewards.tolist(), batch.groups.tolist(), algorithm)
    return gap + algorithm.reward_weight * np.array(of_rewards, dtype=float)[:, None]


def twin_shares(algorithm: Distill, batch: Batch, counts: np.ndarray) -> np.ndarray:
    if algorithm.loss_mean == "token":
        return counts / max(1, counts.sum())
    each = counts.sum(-1, keepdims=True).clip(1) if algorithm.loss_mean == "sequence" else batch.limits.numpy()[:, None]
    return counts / each / len(counts)


def test_advantages_and_loss_are_those_of_numpy():
    for seed in range(1000):
        source = np.random.default_rng(seed)
        algorithm = Distill(reward_weight=float(source.choice([0.0, 0.5, 2.0])), loss_mean=MEANS[seed % 3])
        given, logprobs = random_case(seed)
        batch = algorithm.prepare(given)
        expected = twin_advantages(algorithm, given)
        np.testing.assert_allclose(batch.advantages, expected, rtol=1e-12, atol=1e-12)
        counts = given.mask.numpy() & np.isfinite(given.behaviour_logprobs.numpy())
        ratio = np.exp(logprobs.numpy() - given.proximal_logprobs.numpy())
        old = np.where(counts, given.proximal_logprobs.numpy() - given.behaviour_logprobs.numpy(), 0.0)
        surrogate = -np.minimum(ratio * expected, ratio.clip(0.8, 1.2) * expected) * np.exp(old).clip(max=2.0)
        wanted = (surrogate * twin_shares(algorithm, given, counts)).sum()
        found, metrics = algorithm.loss(batch, output_of(logprobs), totals_of(batch))
        assert float(found) == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        kl = np.where(counts, given.proximal_logprobs.numpy() - given.reference_logprobs.numpy(), 0.0).sum()
        assert algorithm.metrics(batch)["kl"] == pytest.approx(kl / max(1, counts.sum()), rel=1e-12, abs=1e-12)
        assert "kl" not in metrics


def test_over_the_vocabulary_the_divergence_is_added_and_gives_no_advantage():
    for seed in range(1000):
        algorithm = Distill(over="vocabulary", reward_weight=float(seed % 2), loss_mean=MEANS[seed % 3])
        given, logprobs = random_case(seed)
        batch = algorithm.prepare(replace(given, reference_logprobs=None))
        divergence = torch.rand(NUM_SAMPLES, WIDTH, dtype=torch.float64)
        divergence[~batch.mask] = math.nan
        found, metrics = algorithm.loss(batch, replace(output_of(logprobs), divergence=divergence), totals_of(batch))
        plain = GRPO(loss_mean=algorithm.loss_mean)
        of_rewards = plain.loss(plain.prepare(given), output_of(logprobs), totals_of(batch))[0] * (seed % 2)
        counts = batch.mask.numpy()
        known = np.where(counts, divergence.numpy(), 0.0)
        wanted = float(of_rewards) + (known * twin_shares(algorithm, given, counts)).sum()
        assert float(found) == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        assert float(metrics["kl"]) == pytest.approx(known.sum() / max(1, counts.sum()), rel=1e-12)
        assert bool(batch.advantages.any()) == bool(seed % 2)


def test_the_gradient_of_the_sampled_form_is_that_of_the_divergence():
    """By enumeration: all tokens of a small vocabulary, each weighted with the policy that would sample it."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logprobs, judged = logits.log_softmax(-1), teacher.log_softmax(-1)
    chance = logprobs.detach().exp()
    batch = Batch(
        rewards=torch.zeros(TOKENS, dtype=torch.float64),
        groups=torch.arange(TOKENS),
        mask=torch.ones(TOKENS, 1, dtype=torch.bool),
        behaviour_logprobs=logprobs.detach()[:, None],
        reference_logprobs=judged[:, None],
        limits=torch.ones(TOKENS, dtype=torch.int64),
        is_truncated=torch.zeros(TOKENS, dtype=torch.bool),
    )
    algorithm, expected = Distill(), (logprobs.exp() * (logprobs - judged)).sum()
    batch = algorithm.prepare(batch)
    losses = [
        algorithm.loss(batch.select(torch.tensor([i]), 1), output_of(logprobs[i].reshape(1, 1)), totals_of(batch))[0]
        for i in range(TOKENS)
    ]
    surrogate = TOKENS * torch.stack([p * loss for p, loss in zip(chance, losses, strict=True)]).sum()
    (found,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert wanted.abs().max() > 0.05


@pytest.mark.parametrize("settings", [{}, {"reward_weight": 0.7}, {"loss_mean": "sequence", "correction": "none"}])
def test_gradients_by_finite_differences(settings):
    algorithm = Distill(clip_low=9.0, clip_high=9.0, **settings)
    given, logprobs = make_batch()
    batch = algorithm.prepare(given)

    def loss(logprobs: Tensor) -> Tensor:
        return algorithm.loss(batch, output_of(logprobs), totals_of(batch))[0]

    assert torch.autograd.gradcheck(loss, logprobs.requires_grad_())


def test_a_policy_that_is_the_teacher_learns_nothing():
    batch, _ = make_batch()
    batch = replace(batch, reference_logprobs=batch.proximal_logprobs.clone())
    assert not Distill().prepare(batch).advantages.any()


def test_a_token_is_worth_more_where_the_teacher_finds_it_likelier():
    batch, _ = make_batch()
    found = replace(
        batch, proximal_logprobs=None, behaviour_logprobs=rows([-1.0, -2.0, -3.0, -1.0, -1.0]).expand(6, -1)
    )
    judged = rows([-1.0, -1.0, -4.0, -0.5, -1.5]).expand(6, -1)
    advantages = Distill().prepare(replace(found, reference_logprobs=judged)).advantages
    assert torch.equal(advantages[0], tensor(0.0, 1.0, -1.0, 0.5, -0.5))
    assert not advantages[1, 2:].any(), "outside the mask"


def test_what_it_needs():
    assert Distill().needs == {"reference", "proximal", "proximal_in_loss"}
    assert Distill(correction="none").needs == {"reference"}
    assert Distill(over="vocabulary").needs == {"divergence", "proximal_in_loss"}
    assert all(Distill(over=each).reads_reference for each in ("sampled", "vocabulary"))
    assert not Distill().learns_from_rewards
    assert Distill(reward_weight=0.1).learns_from_rewards
    Distill().check(group_size=1)
    with pytest.raises(ValueError, match="group_size=1"):
        Distill(reward_weight=1.0).check(group_size=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reward_weight": -0.5}, "reward_weight=-0.5: expected at least 0"),
        ({"kl_coef": 0.1}, "kl_coef=0.1: expected 0 with Distill"),
        ({"over": "tokens"}, "over='tokens'"),
    ],
)
def test_wrong_settings_say_what_is_allowed(settings, words):
    with pytest.raises(ValueError, match=words):
        Distill(**settings)


def test_without_the_divergence_the_loss_does_not_go_on():
    algorithm = Distill(over="vocabulary")
    batch, logprobs = make_batch()
    with pytest.raises(AssertionError, match="divergence"):
        algorithm.loss(algorithm.prepare(batch), PolicyOutput(logprobs=logprobs, entropy=logprobs), totals_of(batch))
