"""PPO: rewards of tokens, advantages and returns, and the critic's loss. float64, CPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from rhymerl.algos import GRPO, PPO, Batch
from rhymerl.algos.functional import whitened
from tests.algos.batches import make_batch, output_of, rows, tensor, totals_of
from tests.algos.twin import plain_advantages

close = torch.testing.assert_close


def two_answers() -> Batch:
    """Return answers of two tokens and of one; the policy has diverged by 1 at the first token of the first."""
    blank = torch.zeros(2, 2, dtype=torch.float64)
    return Batch(
        rewards=tensor(3, 5),
        groups=torch.tensor([0, 1]),
        mask=torch.tensor([[True, True], [True, False]]),
        behaviour_logprobs=blank,
        reference_logprobs=rows([-1, 0], [0, 9]),
        values=rows([1, 2], [4, 9]),
        limits=torch.tensor([2, 2]),
        is_truncated=torch.tensor([False, False]),
    )


def test_advantages_and_returns_by_hand():
    # Rewards of tokens: -0.1 * 1 and 3; 5. Errors, from behind: 3 - 2 = 1, -0.1 + 2 - 1 = 0.9; 5 - 4 = 1.
    # With lambda = 1/2: 1, 0.9 + 0.5 = 1.4; 1. Returns: plus the values.
    algorithm = PPO(kl_coef=0.1, gae_lambda=0.5, whiten=False)
    batch = algorithm.prepare(two_answers())
    close(batch.advantages, rows([1.4, 1], [1, 0]))
    close(batch.returns, rows([2.4, 3], [5, 0]))


def test_a_cut_answer_is_worth_what_the_critic_expects_behind_it_by_hand():
    # As above without the divergence, with 10 behind the first answer, which was cut, and 7 behind the second, which
    # had ended: 3 + 10 - 2 = 11, 0 + 2 - 1 = 1; 5 - 4 = 1. With lambda = 1/2: 11, 1 + 5.5; 1. Returns: plus the values.
    batch = replace(two_answers(), is_truncated=torch.tensor([True, False]), final_values=tensor(10, 7))
    found = PPO(gae_lambda=0.5, whiten=False, bootstrap_truncated=True).prepare(batch)
    close(found.advantages, rows([6.5, 11], [1, 0]))
    close(found.returns, rows([7.5, 13], [5, 0]))


def test_unless_it_is_asked_for_nothing_is_behind_a_cut_answer():
    batch = replace(two_answers(), is_truncated=torch.tensor([True, False]))
    close(PPO(whiten=False).prepare(batch).returns, PPO(whiten=False).prepare(two_answers()).returns)
    assert PPO().needs == {"proximal_in_loss", "values"}
    assert PPO(bootstrap_truncated=True).needs == {"proximal_in_loss", "values", "final_values"}


def test_with_lambda_one_the_return_of_a_cut_answer_is_discounted_from_behind_it():
    batch = replace(two_answers(), is_truncated=torch.tensor([True, True]), final_values=tensor(10, 7))
    found = PPO(gae_lambda=1.0, gamma=0.5, whiten=False, bootstrap_truncated=True).prepare(batch)
    close(found.returns, rows([3 / 2 + 10 / 4, 3 + 10 / 2], [5 + 7 / 2, 0]))


def test_answers_that_leave_the_loss_are_not_bootstrapped_too():
    with pytest.raises(ValueError, match=r"^bootstrap_truncated=True: expected false with mask_truncated=true"):
        PPO(bootstrap_truncated=True, mask_truncated=True)


def test_advantages_are_whitened_and_returns_are_not():
    plain, ready = PPO(whiten=False).prepare(two_answers()), PPO().prepare(two_answers())
    close(ready.returns, plain.returns)
    close(ready.advantages, whitened(plain.advantages, plain.mask))


def test_advantages_are_those_of_plain_python():
    batch, _ = make_batch()
    found = PPO(kl_coef=0.2, kl_estimator="k3", gamma=0.9, gae_lambda=0.8, overlong_fraction=0.5).advantages(batch)
    lengths = batch.lengths.tolist()
    difference = batch.reference_logprobs - batch.proximal_logprobs
    rewards = (-0.2 * (difference.exp() - 1 - difference)).tolist()
    rewards = [line[:n] for line, n in zip(rewards, lengths, strict=True)]
    for i, (line, n) in enumerate(zip(rewards, lengths, strict=True)):
        limit = int(batch.limits[i])
        line[-1] += float(batch.rewards[i]) + min(0.0, (limit / 2 - n) / (limit / 2))
    values = [line[:n] for line, n in zip(batch.values.tolist(), lengths, strict=True)]
    for line, n, expected in zip(
        found, lengths, plain_advantages(rewards, values, gamma=0.9, gae_lambda=0.8), strict=True
    ):
        close(line[:n], tensor(*expected))


def test_a_critic_that_is_right_leaves_no_advantage():
    batch = two_answers()
    batch = replace(batch, values=batch.rewards[:, None].expand(2, 2))
    assert PPO(whiten=False).advantages(batch).abs().max() == 0


def test_the_loss_is_the_policys_and_the_critics_by_hand():
    batch = PPO().prepare(two_answers())
    batch = replace(batch, advantages=rows([1, 1], [-2, 0]), returns=rows([3, 3], [3, 0]))
    logprobs = torch.zeros(2, 2, dtype=torch.float64)
    # Old values 1, 2, 4. 1. 1 -> 1.5, clipped 1.2: 1.8^2 / 2 = 1.62. 2. 2 -> 2: 1 / 2. 3. 4 -> 3.5, clipped 3.8:
    # 0.8^2 / 2 = 0.32. The policy's: -(1 + 1 - 2) / 3 = 0.
    loss, metrics = PPO(value_coef=0.5).loss(
        batch, output_of(logprobs, values=rows([1.5, 2], [3.5, 7])), totals_of(batch)
    )
    assert float(metrics["critic/vf_loss"]) == pytest.approx((1.62 + 0.5 + 0.32) / 3)
    assert float(metrics["critic/vf_clipfrac"]) == pytest.approx(2 / 3)
    assert float(loss) == pytest.approx(0.5 * (1.62 + 0.5 + 0.32) / 3)
    assert metrics["loss"] == loss


def test_the_policys_part_is_that_of_every_policy_gradient():
    batch, logprobs = make_batch()
    batch = PPO().prepare(batch)
    output = output_of(logprobs)
    policy, whole = (
        GRPO().loss(batch, output, totals_of(batch)),
        PPO(value_coef=0.0).loss(batch, output, totals_of(batch)),
    )
    close(policy[0], whole[0])
    assert policy[1].items() <= whole[1].items()


def test_a_policy_that_does_not_move_leaves_the_critics_gradient():
    """This is the critic's warm-up: log-probs have no gradient, values have."""
    batch, logprobs = make_batch()
    batch = PPO().prepare(batch)
    values = torch.zeros_like(logprobs).requires_grad_()
    PPO(value_coef=1.0, value_clip=None).loss(batch, output_of(logprobs, values=values), totals_of(batch))[0].backward()
    close(values.grad, -batch.returns * batch.mask / batch.mask.sum())


def test_explained_variance_of_the_step_by_hand():
    # Returns 3, 3, 5: variance 4/3. Errors 2, 1, 1: variance 1/3.
    algorithm = PPO(gae_lambda=1.0)
    nothing = {"sampling/nonfinite_tokens": 0.0}
    found = algorithm.metrics(algorithm.prepare(two_answers()))
    assert found == pytest.approx({**nothing, "critic/vf_explained_var": 0.75})
    batch = replace(two_answers(), rewards=tensor(3, 3))
    assert algorithm.metrics(algorithm.prepare(batch)) == nothing


def test_the_step_tells_of_divergence_and_critic():
    algorithm = PPO(kl_coef=0.1)
    found = algorithm.metrics(algorithm.prepare(two_answers()))
    assert {name: found[name] for name in ("kl", "kl_coef")} == pytest.approx({"kl": 1 / 3, "kl_coef": 0.1})
    assert "critic/vf_explained_var" in found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"gamma": 1.1}, "0 to 1"),
        ({"gae_lambda": -0.1}, "0 to 1"),
        ({"value_coef": -1.0}, "at least 0"),
        ({"value_clip": 0.0}, "more than 0, or null"),
    ],
    ids=str,
)
def test_bad_settings_are_named(settings, expected):
    name, value = next(iter(settings.items()))
    message = f"{name}={value!r}: expected {expected}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PPO(**settings)
