"""The maths of the algorithms: numbers worked by hand. float64, CPU."""

from __future__ import annotations

import math

import pytest
import torch

from rhymerl.algos.functional import (
    at_last_token,
    bounded_weight,
    cispo_surrogate,
    clipped_surrogate,
    clipped_value_loss,
    divergence,
    explained_variance,
    generalized_advantages,
    group_advantages,
    importance_weight,
    masked_sum,
    overlong_penalty,
    policy_ratio,
    sums_from_here,
    weighted_divergence,
    whitened,
)
from tests.algos.batches import rows, tensor
from tests.algos.twin import plain_advantages

close = torch.testing.assert_close


# -- advantages ------------------------------------------------------------------------------------------------------

REWARDS, GROUPS = tensor(1, 0, 0, 1, 5, 3), torch.tensor([7, 7, 7, 7, 2, 2])


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        # Group 7 has the mean 1/2, group 2 the mean 4.
        ("group", "none", [0.5, -0.5, -0.5, 0.5, 1, -1]),
        # Sample deviations: sqrt(4 * 1/4 / 3) = sqrt(1/3), and sqrt((1 + 1) / 1) = sqrt(2).
        ("group", "group", [0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5, 0.5**0.5, -(0.5**0.5)]),
        # All six: mean 10/6, squares 1 + 1 + 25 + 9 = 36, so variance (36 - 100/6) / 5 = 58/15.
        ("group", "batch", [x / (58 / 15) ** 0.5 for x in (0.5, -0.5, -0.5, 0.5, 1, -1)]),
        # 1 - 1/3, 0 - 2/3; 5 - 3, 3 - 5.
        ("leave_one_out", "none", [2 / 3, -2 / 3, -2 / 3, 2 / 3, 2, -2]),
        ("none", "none", [1, 0, 0, 1, 5, 3]),
        ("none", "batch", [x / (58 / 15) ** 0.5 for x in (1, 0, 0, 1, 5, 3)]),
    ],
)
def test_group_advantages_by_hand(baseline, scale, expected):
    close(group_advantages(REWARDS, GROUPS, baseline=baseline, scale=scale, epsilon=0.0), tensor(*expected))


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_equal_rewards_give_no_advantage(baseline):
    advantages = group_advantages(tensor(2, 2, 2), torch.zeros(3).long(), baseline=baseline, scale="group")
    assert advantages.abs().max() == 0


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_that_is_alone_gives_no_nan(scale):
    for baseline in ("group", "leave_one_out", "none"):
        assert group_advantages(tensor(2), torch.tensor([0]), baseline=baseline, scale=scale).isfinite().all()


def test_overlong_penalty_by_hand():
    # Limit 20 and a quarter of it: nothing up to 15 tokens, then 1/5 each, -1 at 20; limit 10: half way at 8.75.
    penalty = overlong_penalty(
        torch.tensor([3, 15, 16, 18, 20, 8, 9]), torch.tensor([20, 20, 20, 20, 20, 10, 10]), fraction=0.25
    )
    close(penalty, tensor(0, 0, -0.2, -0.6, -1, -0.2, -0.6))


def test_a_score_stands_at_the_last_token_that_counts():
    mask = torch.tensor([[True, True, False], [True, False, True], [False, False, False]])
    close(at_last_token(tensor(5, 7, 9), mask), rows([0, 5, 0], [0, 0, 7], [0, 0, 0]))


def test_sums_from_here_by_hand():
    close(sums_from_here(rows([1, 2, 4])), rows([7, 6, 4]))


def test_generalized_advantages_by_hand():
    # gamma = 1/2, lambda = 1/2. Errors from behind: 1 + 0 - 2 = -1; 0 + 1/2 * 2 - 4 = -3; 0 + 1/2 * 4 - 1 = 1.
    # Sums: -1; -3 - 1/4 = -3.25; 1 - 3.25 / 4 = 0.1875.
    mask = torch.tensor([[True, True, True, False]])
    found = generalized_advantages(rows([0, 0, 1, 9]), rows([1, 4, 2, 9]), mask, gamma=0.5, gae_lambda=0.5)
    close(found, rows([0.1875, -3.25, -1, 0]))


def test_generalized_advantages_with_a_value_behind_the_last_token_by_hand():
    # gamma = 1/2, lambda = 1/2, and 6 behind the last token of the first answer, 0 behind that of the second.
    # Errors from behind: 1 + 1/2 * 6 - 2 = 2; 0 + 1/2 * 2 - 4 = -3; 0 + 1/2 * 4 - 1 = 1. Sums: 2; -3 + 2/4 = -2.5; 1 -
    # 2.5/4 = 0.375. The second answer: 5 + 0 - 3 = 2.
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    rewards, values = rows([0, 0, 1, 9], [5, 9, 9, 9]), rows([1, 4, 2, 9], [3, 9, 9, 9])
    found = generalized_advantages(rewards, values, mask, gamma=0.5, gae_lambda=0.5, final_values=tensor(6, 0))
    close(found, rows([0.375, -2.5, 2, 0], [2, 0, 0, 0]))


def test_generalized_advantages_pass_over_what_does_not_count():
    rewards, values = rows([0, 7, 0, 1]), rows([1, 8, 4, 2])
    mask = torch.tensor([[True, False, True, True]])
    found = generalized_advantages(rewards, values, mask, gamma=0.5, gae_lambda=0.5)
    close(found, rows([0.1875, 0, -3.25, -1]))


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.0), (0.97, 1.0)])
def test_generalized_advantages_are_their_definition(gamma, gae_lambda):
    generator = torch.Generator().manual_seed(1)
    rewards, values = (torch.randn(3, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    lengths = [7, 1, 4]
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    found = generalized_advantages(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    cut = [[line[:n] for line, n in zip(it.tolist(), lengths, strict=True)] for it in (rewards, values)]
    for line, n, expected in zip(
        found, lengths, plain_advantages(*cut, gamma=gamma, gae_lambda=gae_lambda), strict=True
    ):
        close(line[:n], tensor(*expected))
        assert line[n:].abs().sum() == 0


def test_with_lambda_one_the_return_is_the_discounted_sum_of_rewards():
    rewards, values = rows([1, 2, 4]), rows([3, -5, 8])
    found = generalized_advantages(rewards, values, torch.ones(1, 3).bool(), gamma=0.5, gae_lambda=1.0)
    close(found + values, rows([1 + 1 + 1, 2 + 2, 4]))


def test_whitened_by_hand():
    # 1, 3 and 5: mean 3, sample variance 4.
    mask = torch.tensor([[True, True], [True, False]])
    close(whitened(rows([1, 3], [5, 99]), mask, epsilon=0.0), rows([-1, 0], [1, 0]))
    assert whitened(rows([4, 2]), torch.tensor([[True, False]])).tolist() == [[0, 0]]


# -- ratios ----------------------------------------------------------------------------------------------------------


def test_sequence_ratio_by_hand():
    # Mean of log 2 and log 8 is log 4; the second answer has one token.
    mask = torch.tensor([[True, True], [True, False]])
    log_ratio = rows([math.log(2), math.log(8)], [math.log(3), 0]).requires_grad_()
    ratio = policy_ratio(log_ratio, mask, level="sequence")
    close(ratio[mask], tensor(4, 4, 3))
    # Each token has the gradient of its own log-prob, and the answer's ratio as weight.
    (gradient,) = torch.autograd.grad(masked_sum(ratio * rows([1, 10], [100, 0]), mask), log_ratio)
    close(gradient, rows([4, 40], [300, 0]))
    close(policy_ratio(log_ratio, mask, level="token")[mask], tensor(2, 8, 3))


def test_clipped_surrogate_by_hand():
    # positive advantage: 1.5 is cut to 1.2; negative: 0.5 is cut to 0.8, and 1.5 is not cut (the worse of both)
    ratio, advantages = tensor(1.5, 0.5, 0.5, 1.5), tensor(2, 2, -1, -1)
    close(clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.2), tensor(-2.4, -1.0, 0.8, 1.5))
    close(clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.4), tensor(-2.8, -1.0, 0.8, 1.5))


def test_dual_clip_by_hand():
    # Only a negative advantage is bounded: 9 * 1 becomes 3 * 1, while 2 stays; and 9 * 2 is cut to 1.2 * 2 as ever.
    found = clipped_surrogate(tensor(9, 2, 9), tensor(-1, -1, 2), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    close(found, tensor(3, 2, -2.4))


def test_cispo_by_hand():
    ratio, logprobs = tensor(9, 0.1, 1.0), tensor(-2, -3, -5).requires_grad_()
    found = cispo_surrogate(ratio, tensor(1, -1, 2), logprobs, clip_low=0.5, clip_high=3.0)
    close(found, tensor(4 * 2, -0.5 * 3, 2 * 5))
    # A clipped token keeps a gradient: its weight times its advantage.
    close(torch.autograd.grad(found.sum(), logprobs)[0], tensor(-4, 0.5, -2))


def test_importance_weight_by_hand():
    log_weight = rows([math.log(2), math.log(3)], [math.log(5), 0])
    close(importance_weight(log_weight, level="token"), rows([2, 3], [5, 1]))
    close(importance_weight(log_weight, level="sequence"), rows([6], [5]))


@pytest.mark.parametrize(
    ("masked", "floor", "cap", "expected", "outside"),
    [
        (False, None, 2.0, [0.1, 1, 2, 2], [False, False, False, True]),
        (False, 0.5, 2.0, [0.5, 1, 2, 2], [True, False, False, True]),
        (True, 0.5, 2.0, [0, 1, 2, 0], [True, False, False, True]),
        (True, None, None, [0.1, 1, 2, 7], [False] * 4),
    ],
)
def test_bounded_weight_by_hand(masked, floor, cap, expected, outside):
    weight, is_outside = bounded_weight(tensor(0.1, 1, 2, 7), masked=masked, floor=floor, cap=cap)
    close(weight, tensor(*expected))
    assert is_outside.tolist() == outside


def test_an_infinite_weight_is_bounded():
    for masked, expected in ((False, 2.0), (True, 0.0)):
        assert bounded_weight(tensor(math.inf), masked=masked, cap=2.0)[0].tolist() == [expected]


# -- divergences -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", -math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 1 - math.log(2))]
)
def test_divergence_by_hand(estimator, expected):
    # r = p_ref / p = 2
    found = divergence(tensor(math.log(0.25)), tensor(math.log(0.5)), estimator=estimator)
    close(found, tensor(expected))


def softmaxes() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy over four tokens, with gradient, and its reference's log-probs."""
    generator = torch.Generator().manual_seed(2)
    logits, reference = (torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(2))
    return logits.requires_grad_(), reference.log_softmax(-1)


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_weighted_divergence_has_the_gradient_of_the_divergence(estimator, off_policy):
    """All tokens in turn, weighted with the probability of being drawn: the expectation, without chance."""
    logits, reference = softmaxes()
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    behaviour = tensor(0.1, 0.2, 0.3, 0.4).log() if off_policy else logprobs.detach()
    estimate = divergence(logprobs, reference, estimator=estimator)
    weighted = weighted_divergence(estimate, (logprobs - behaviour).exp(), estimator=estimator)
    (found,) = torch.autograd.grad((behaviour.exp() * weighted).sum(), logits)
    close(found, exact)


def test_k1_alone_has_no_gradient_and_k3_alone_that_of_the_other_divergence():
    logits, reference = softmaxes()
    logprobs = logits.log_softmax(-1)
    chance = logprobs.detach().exp()

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    assert gradient((chance * divergence(logprobs, reference, estimator="k1")).sum()).abs().max() < 1e-12
    other = gradient((reference.exp() * (reference - logprobs)).sum())
    close(gradient((chance * divergence(logprobs, reference, estimator="k3")).sum()), other)


# -- values ----------------------------------------------------------------------------------------------------------


def test_clipped_value_loss_by_hand():
    # 1. Moved from 0 to 1 towards 3 but clipped at 0.2: 2.8^2 is worse than 2^2. 2. Moved away: 4^2 is worse than
    # (0.2 + 3)^2. 3. Within the clip both are the same.
    values, returns, old = tensor(1, 1, 0.1), tensor(3, -3, 1), tensor(0, 0, 0)
    loss, is_clipped = clipped_value_loss(values, returns, old, clip=0.2)
    close(loss, tensor(2.8**2 / 2, 8, 0.9**2 / 2))
    assert is_clipped.tolist() == [True, False, False]
    loss, is_clipped = clipped_value_loss(values, returns, old, clip=None)
    close(loss, tensor(2, 8, 0.9**2 / 2))
    assert not is_clipped.any()


def test_explained_variance_by_hand():
    # Returns 0, 2, 4 vary by 4; errors 0, 1, 0 by 1/3.
    mask = torch.tensor([[True, True, True, False]])
    assert explained_variance(rows([0, 1, 4, 9]), rows([0, 2, 4, 0]), mask) == pytest.approx(1 - 1 / 12)
    assert explained_variance(rows([0, 1, 4, 9]), rows([2, 2, 2, 0]), mask) is None


# -- probabilities that have come far apart --------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [89.0, 1e4])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ratios_beyond_a_float_are_finite_and_have_no_gradient(apart, level):
    """exp(89) is infinite in float32, and infinity times an advantage of 0 is no number."""
    log_ratio = torch.tensor([[apart, 0.0]], requires_grad=True)
    ratio = policy_ratio(log_ratio, torch.ones(1, 2, dtype=torch.bool), level=level)
    for advantage in (0.0, -1.0):
        loss = clipped_surrogate(ratio, torch.full_like(ratio, advantage), clip_low=0.2, clip_high=0.2).sum()
        (gradient,) = torch.autograd.grad(loss, log_ratio, retain_graph=True)
        assert loss.isfinite()
        assert gradient[0, 0] == 0.0
    assert importance_weight(log_ratio.detach(), level=level).square().isfinite().all()


def test_a_divergence_beyond_a_float_is_finite_and_pulls_nowhere():
    logprobs = torch.tensor([-1e3, -25.0, -15.0], requires_grad=True)
    estimate = divergence(logprobs, torch.zeros(3), estimator="k3")
    (gradient,) = torch.autograd.grad(estimate.sum(), logprobs)
    assert estimate.square().isfinite().all()
    assert gradient[:2].tolist() == [0.0, 0.0]
    close(gradient[2], 1 - torch.tensor(15.0).exp())
