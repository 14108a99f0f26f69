"""GRPO: numbers worked by hand, and identities that any right loss obeys. float64, CPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rhymerl.algos import GRPO, Batch, PolicyOutput, Totals
from rhymerl.algos.functional import clipped_surrogate, group_advantages, k3_divergence
from rhymerl.errors import ConfigError


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_group_advantages_by_hand():
    rewards, groups = tensor(1, 0, 0, 1, 5, 3), torch.tensor([7, 7, 7, 7, 2, 2])
    # group 7: mean 1/2, sample std sqrt(4 * 1/4 / 3) = 0.57735; group 2: mean 4, std sqrt(2)
    plain = group_advantages(rewards, groups, normalize_std=False)
    torch.testing.assert_close(plain, tensor(0.5, -0.5, -0.5, 0.5, 1, -1))
    scaled = group_advantages(rewards, groups, normalize_std=True, epsilon=0.0)
    a, b = 0.5 / math.sqrt(1 / 3), 1 / math.sqrt(2)
    torch.testing.assert_close(scaled, tensor(a, -a, -a, a, b, -b))


def test_equal_rewards_give_no_advantage():
    assert group_advantages(tensor(2, 2, 2), torch.zeros(3).long(), normalize_std=True).abs().max() == 0


def test_clipped_surrogate_by_hand():
    # positive advantage: 1.5 is cut to 1.2; negative: 0.5 is cut to 0.8, and 1.5 is not cut (the worse of both)
    ratio, advantages = tensor(1.5, 0.5, 0.5, 1.5), tensor(2, 2, -1, -1)
    expected = tensor(-2.4, -1.0, 0.8, 1.5)
    torch.testing.assert_close(clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.2), expected)
    raised = clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.4)
    torch.testing.assert_close(raised, tensor(-2.8, -1.0, 0.8, 1.5))


def test_k3_by_hand():
    # r = p_ref / p = 2: 2 - ln 2 - 1
    torch.testing.assert_close(k3_divergence(tensor(math.log(0.25)), tensor(math.log(0.5))), tensor(1 - math.log(2)))


def make_batch(num_samples: int = 6, width: int = 5, seed: int = 0) -> tuple[Batch, torch.Tensor]:
    """A random batch with ragged masks, and the log-probs of a policy that has moved a little."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (num_samples,), generator=generator)
    behaviour = -torch.rand(num_samples, width, generator=generator, dtype=torch.float64)
    moved = behaviour + 0.3 * torch.randn(num_samples, width, generator=generator, dtype=torch.float64)
    batch = Batch(
        rewards=torch.rand(num_samples, generator=generator, dtype=torch.float64),
        groups=torch.arange(num_samples) // 2,
        mask=torch.arange(width) < lengths[:, None],
        behaviour_logprobs=behaviour,
        limits=torch.full((num_samples,), width),
        is_truncated=torch.zeros(num_samples, dtype=torch.bool),
        reference_logprobs=behaviour - 0.1,
    )
    return batch, moved


def with_advantages(batch: Batch, algorithm: GRPO) -> Batch:
    return replace(batch, advantages=algorithm.advantages(batch))


def loss_of(algorithm: GRPO, batch: Batch, logprobs: torch.Tensor, num_tokens: int) -> torch.Tensor:
    totals = Totals(num_tokens=num_tokens, num_samples=6)
    return algorithm.loss(batch, PolicyOutput(logprobs=logprobs, entropy=torch.zeros_like(logprobs)), totals)[0]


@pytest.mark.parametrize("split", [1, 2, 3, 5])
def test_micro_batches_sum_to_the_batch(split):
    algorithm = GRPO(kl_coef=0.1)
    batch, moved = make_batch()
    batch = with_advantages(batch, algorithm)
    total = int(batch.mask.sum())
    logprobs = moved.requires_grad_()
    whole = loss_of(algorithm, batch, logprobs, total)
    (gradient,) = torch.autograd.grad(whole, logprobs)
    parts = [torch.arange(6)[:split], torch.arange(6)[split:]]
    losses = []
    for part in parts:
        width = int(batch.mask[part].sum(-1).max())
        losses.append(loss_of(algorithm, batch.select(part, width), logprobs[part][:, :width], total))
    torch.testing.assert_close(sum(losses), whole)
    torch.testing.assert_close(torch.autograd.grad(sum(losses), logprobs)[0], gradient)


def test_without_clipping_the_first_step_is_the_policy_gradient():
    algorithm = GRPO(clip_low=1e9, clip_high=1e9)
    batch, _ = make_batch()
    batch = with_advantages(batch, algorithm)
    logprobs = batch.behaviour_logprobs.clone().requires_grad_()
    total = int(batch.mask.sum())
    loss_of(algorithm, batch, logprobs, total).backward()
    torch.testing.assert_close(logprobs.grad, -batch.advantages * batch.mask / total)


def test_zero_advantage_is_zero_gradient_and_padding_never_counts():
    algorithm = GRPO()
    batch, moved = make_batch()
    logprobs = moved.masked_fill(~batch.mask, float("nan")).requires_grad_()
    flat = replace(batch, advantages=torch.zeros_like(moved), reference_logprobs=None)
    loss = loss_of(algorithm, flat, logprobs, 10)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss == 0
    assert gradient[batch.mask].abs().max() == 0
    assert loss_of(algorithm, with_advantages(batch, algorithm), logprobs, 10).isfinite()


def test_gradient_by_finite_differences():
    algorithm = GRPO(kl_coef=0.2)
    batch, moved = make_batch()
    batch = with_advantages(batch, algorithm)
    torch.autograd.gradcheck(lambda logprobs: loss_of(algorithm, batch, logprobs, 9), (moved.requires_grad_(),))


def test_metrics_by_hand():
    mask = torch.tensor([[True, True, False]])
    batch = Batch(
        rewards=tensor(1.0), groups=torch.tensor([0]), mask=mask, behaviour_logprobs=torch.zeros(1, 3).double(),
        limits=torch.tensor([3]), is_truncated=torch.tensor([False]), advantages=torch.ones(1, 3).double(),
    )  # fmt: skip
    logprobs = tensor(math.log(1.5), math.log(0.9), 7.0)[None]
    _, metrics = GRPO().loss(
        batch, PolicyOutput(logprobs=logprobs, entropy=tensor(0.4, 0.2, 9)[None]), Totals(num_tokens=2, num_samples=1)
    )
    expected = {
        "clip_ratio/high_mean": 0.5,
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/region_mean": 0.5,
        "sampling/importance_sampling_ratio/min": 0.9,
        "sampling/importance_sampling_ratio/max": 1.5,
        "sampling/importance_sampling_ratio/mean": 1.2,
        "entropy": 0.3,
        "loss": -(1.2 + 0.9) / 2,
    }
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value), name


@pytest.mark.parametrize("settings", [{"clip_low": -0.1}, {"kl_coef": -1.0}])
def test_bad_settings_are_named(settings):
    with pytest.raises(ConfigError, match=f"algo.{next(iter(settings))}"):
        GRPO(**settings)


def test_a_group_of_one_is_refused():
    with pytest.raises(ConfigError, match="rollout.group_size=1"):
        GRPO().check(group_size=1)
