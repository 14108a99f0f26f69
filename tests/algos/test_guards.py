"""Inputs that say nothing: answers without a reward, equal rewards, log-probs that are no numbers or far apart."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rhymerl.algos import GRPO, PPO, Batch
from tests.algos.batches import NUM_SAMPLES, WIDTH, loss_of, make_batch, output_of, tensor, totals_of
from tests.algos.test_policy_gradient import SETTINGS, each_setting
from tests.algos.twin import plain_group_advantages, plain_loss

BROKEN = (math.nan, math.inf, -math.inf)
COMPARED = [{"baseline": b, "scale": s} for b in ("group", "leave_one_out", "none") for s in ("group", "batch", "none")]


def wild_batch(chance: random.Random) -> tuple[Batch, Tensor, list[float | None]]:
    """A batch with log-probs that are far apart or broken, and rewards of which many are equal or None."""
    batch, logprobs = make_batch(chance.randrange(2**31))
    behaviour, proximal = batch.behaviour_logprobs, batch.proximal_logprobs
    for i in range(NUM_SAMPLES):
        for t in range(WIDTH):
            if chance.random() < 0.1:
                behaviour[i, t] = chance.choice(BROKEN)
            if chance.random() < 0.1:
                proximal[i, t] -= chance.choice((30.0, 1e3, -1e3))
    rewards = [chance.choice((None, 0.1, 0.3, chance.random())) for _ in range(NUM_SAMPLES)]
    groups = torch.tensor([chance.randrange(3) for _ in range(NUM_SAMPLES)])
    known = tensor(*[math.nan if reward is None else reward for reward in rewards])
    return replace(batch, rewards=known, groups=groups), logprobs, rewards


def test_the_loss_with_guards_is_that_of_plain_python():
    chance = random.Random(0)
    for number in range(600):
        settings = {**SETTINGS[number % len(SETTINGS)], **(COMPARED[number % len(COMPARED)])}
        algorithm = GRPO(**settings)
        given, logprobs, rewards = wild_batch(chance)
        kept = torch.tensor([i for i, reward in enumerate(rewards) if reward is not None])
        if not len(kept):
            continue
        given, logprobs = given.select(kept, WIDTH), logprobs[kept]  # as the update does
        wanted = plain_group_advantages(rewards, _groups_of(rewards, given), algorithm)
        advantages = tensor(*[each for each in wanted if each is not None])[:, None].expand(-1, WIDTH)
        batch, output = algorithm.prepare(given), output_of(logprobs)
        assert torch.allclose(batch.advantages, advantages, rtol=1e-12, atol=1e-12), settings
        assert not batch.advantages[advantages == 0].any(), settings
        expected = plain_loss(
            algorithm, replace(given, advantages=advantages), logprobs.tolist(), output.entropy.tolist()
        )
        assert float(algorithm.loss(batch, output, totals_of(batch))[0]) == pytest.approx(expected, rel=1e-12), settings


def _groups_of(rewards: list[float | None], kept: Batch) -> list[int]:
    """Return the group of every answer; that of one without a reward does not matter."""
    groups = iter(kept.groups.tolist())
    return [0 if reward is None else next(groups) for reward in rewards]


@pytest.mark.parametrize("family", [GRPO, PPO])
@each_setting
def test_a_token_whose_behaviour_is_not_a_number_leaves_loss_mean_and_gradient(family, settings):
    algorithm = family(**{name: value for name, value in settings.items() if name != "scale" or family is GRPO})
    batch, logprobs = make_batch()
    for (i, t), value in zip(((0, 4), (2, 1), (3, 0)), BROKEN, strict=True):  # a last token, one, and a whole answer
        batch.behaviour_logprobs[i, t] = value
    found = algorithm.prepare(batch)
    assert totals_of(found).num_tokens == totals_of(batch).num_tokens - 3
    assert algorithm.metrics(found)["sampling/nonfinite_tokens"] == 3
    logprobs.requires_grad_()
    loss, metrics = algorithm.loss(found, output_of(logprobs), totals_of(found))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert all(value.isfinite() for value in metrics.values())
    assert gradient.isfinite().all()
    assert gradient[0, 4] == gradient[2, 1] == gradient[3, 0] == 0
    assert gradient.any()


@each_setting
@pytest.mark.parametrize("apart", [89.0, 1e4])
def test_a_group_without_advantage_gives_0_however_far_probabilities_are_apart(settings, apart):
    """In float32, where exp(89) is infinite."""
    algorithm = GRPO(**{**settings, "kl_coef": 0.0, "entropy_coef": 0.0})
    batch, logprobs = make_batch()
    old = batch.proximal_logprobs
    batch = replace(batch, proximal_logprobs=old - apart, behaviour_logprobs=old - 2 * apart)
    batch = algorithm.prepare(replace(batch, rewards=torch.full_like(batch.rewards, 0.1))).cast(torch.float32)
    logprobs = logprobs.float().requires_grad_()
    loss = loss_of(algorithm, batch, logprobs)
    assert loss == 0
    assert not torch.autograd.grad(loss, logprobs)[0].any()


@pytest.mark.parametrize("settings", [each for each in COMPARED if each["baseline"] != "none"])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1 / 3] * 6, [0.1]], ids=len)
def test_equal_rewards_give_no_advantage_at_all(settings, rewards):
    """The mean of 7 x 0.1 is another number; a deviation of rounding errors alone would raise that a thousandfold."""
    batch, _ = make_batch()
    index = torch.tensor([0] * len(rewards) + [1, 2])
    others = replace(batch.select(index, WIDTH), rewards=tensor(*rewards, 0.0, 1.0))
    others = replace(others, groups=torch.tensor([5] * len(rewards) + [3, 3]))
    advantages = GRPO(**settings).advantages(others)
    assert not advantages[: len(rewards)].any()
    assert advantages[len(rewards) :].all()
