"""The rules that every algorithm's loss obeys, whatever its settings: identities, and a second implementation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rhymerl.algos import GRPO, PPO, Batch, PolicyGradient, PolicyOutput, Totals
from tests.algos.batches import loss_of, make_batch, output_of, rows, tensor, totals_of, with_advantages
from tests.algos.twin import plain_loss

close = torch.testing.assert_close

SETTINGS = [
    {},
    {"loss_mean": "sequence"},
    {"loss_mean": "constant", "scale": "none"},
    {"ratio_level": "sequence", "loss_mean": "sequence", "clip_low": 0.01, "clip_high": 0.02},
    {"clip_high": 0.5, "dual_clip": 1.3},
    {"surrogate": "cispo", "clip_low": 0.3, "clip_high": 0.1},
    {"surrogate": "cispo", "ratio_level": "sequence", "clip_high": 0.05},
    {"kl_coef": 0.3, "kl_estimator": "k1"},
    {"kl_coef": 0.3, "kl_estimator": "k2", "correction": "none"},
    {"kl_coef": 0.3, "kl_unbiased": False, "loss_mean": "sequence"},
    {"kl_coef": 0.3, "correction": "masked", "correction_floor": 0.7, "correction_cap": 1.4},
    {"entropy_coef": 0.1, "loss_mean": "constant"},
    {"correction_cap": None},
    {"correction": "none"},
    {"correction_cap": 1.1, "correction_floor": 0.9},
    {"correction_level": "sequence", "correction_cap": 1.2},
    {"correction": "masked", "correction_level": "sequence", "correction_floor": 0.5, "correction_cap": 2.0},
]
each_setting = pytest.mark.parametrize("settings", SETTINGS, ids=str)


def of_family(settings: dict, family: type[PolicyGradient]) -> dict:
    """Return the settings that the family has."""
    return {name: value for name, value in settings.items() if name != "scale" or family is GRPO}


@each_setting
def test_the_loss_is_that_of_plain_python(settings):
    algorithm = GRPO(**settings)
    batch, logprobs = make_batch()
    batch = algorithm.prepare(batch)
    output = output_of(logprobs)
    expected = plain_loss(algorithm, batch, logprobs.tolist(), output.entropy.tolist())
    assert float(algorithm.loss(batch, output, totals_of(batch))[0]) == pytest.approx(expected, rel=1e-12)


@each_setting
@pytest.mark.parametrize("family", [GRPO, PPO])
@pytest.mark.parametrize("split", [1, 3, 5])
def test_micro_batches_sum_to_the_batch(split, family, settings):
    algorithm = family(**of_family(settings, family))
    batch, logprobs = make_batch()
    batch = algorithm.prepare(batch)
    totals = totals_of(batch)
    logprobs.requires_grad_()
    whole, metrics = algorithm.loss(batch, output_of(logprobs), totals)
    (gradient,) = torch.autograd.grad(whole, logprobs)
    losses, parts = [], []
    for part in (torch.arange(6)[:split], torch.arange(6)[split:]):
        width = int(batch.mask[part].sum(-1).max())
        found = algorithm.loss(batch.select(part, width), output_of(logprobs[part][:, :width]), totals)
        losses.append(found[0])
        parts.append(found[1])
    close(sum(losses), whole)
    close(torch.autograd.grad(sum(losses), logprobs)[0], gradient)
    for name, value in metrics.items():
        if not name.endswith(("/min", "/max")):
            close(sum(part[name] for part in parts), value)


def has_stopped_gradient(settings: dict) -> bool:
    """Return whether its gradient is not the value's, so that finite differences cannot check it; other tests do."""
    return bool({"cispo", "sequence"} & {settings.get("surrogate"), settings.get("ratio_level")})


@pytest.mark.parametrize("settings", [it for it in SETTINGS if not has_stopped_gradient(it)], ids=str)
@pytest.mark.parametrize("family", [GRPO, PPO])
def test_gradient_by_finite_differences(family, settings):
    if settings.get("kl_estimator") == "k2":  # its weight is a constant
        settings = {**settings, "kl_unbiased": False}
    algorithm = family(**of_family(settings, family))
    batch, logprobs = make_batch()
    batch = algorithm.prepare(batch)
    assert torch.autograd.gradcheck(lambda it: loss_of(algorithm, batch, it), (logprobs.requires_grad_(),))


@each_setting
def test_zero_advantage_is_zero_gradient_and_padding_never_counts(settings):
    algorithm = GRPO(**{**settings, "kl_coef": 0.0, "entropy_coef": 0.0})
    batch, logprobs = make_batch()
    nan = float("nan")
    blank = {
        name: getattr(batch, name).masked_fill(~batch.mask, nan)
        for name in ("behaviour_logprobs", "proximal_logprobs", "reference_logprobs")
    }
    batch = with_advantages(replace(batch, **blank), torch.zeros_like(logprobs))
    logprobs = logprobs.masked_fill(~batch.mask, nan).requires_grad_()
    loss = algorithm.loss(batch, output_of(logprobs), totals_of(batch))[0]
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss == 0
    assert gradient.abs().max() == 0
    algorithm = GRPO(**{"kl_coef": 0.1, **settings})
    batch = with_advantages(batch, torch.ones_like(logprobs).masked_fill(~batch.mask, nan))
    output = PolicyOutput(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    loss, metrics = algorithm.loss(batch, output, totals_of(batch))
    assert loss.isfinite()
    assert all(value.isfinite() for value in metrics.values())
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert gradient[batch.mask].isfinite().all()


@pytest.mark.parametrize("family", [GRPO, PPO])
def test_without_clipping_the_first_step_is_the_policy_gradient(family):
    algorithm = family(clip_low=1e9, clip_high=1e9)
    batch, _ = make_batch()
    batch = algorithm.prepare(replace(batch, proximal_logprobs=None))
    logprobs = batch.behaviour_logprobs.clone().requires_grad_()
    output = output_of(logprobs, values=torch.zeros_like(logprobs))
    algorithm.loss(batch, output, totals_of(batch))[0].backward()
    close(logprobs.grad, -batch.advantages * batch.mask / batch.mask.sum())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_at_the_first_mini_batch_no_surrogate_differs(level):
    """The ratio is 1: clipped, dually clipped, of the answer or CISPO's, all have the gradient of the log-probs."""
    batch, _ = make_batch()
    gradients = []
    for settings in ({}, {"dual_clip": 2.0}, {"ratio_level": level}, {"surrogate": "cispo"}):
        algorithm = GRPO(**settings)
        ready = algorithm.prepare(batch)
        logprobs = batch.proximal_logprobs.clone().requires_grad_()
        loss, metrics = algorithm.loss(ready, output_of(logprobs), totals_of(batch))
        gradients.append(torch.autograd.grad(loss, logprobs)[0])
        assert metrics["off_policy/kl"] == 0
        assert metrics["clip_ratio/region_mean"] == 0
    for gradient in gradients[1:]:
        close(gradient, gradients[0])


def test_decoupled_without_bounds_and_clips_is_importance_sampling_from_the_behaviour_policy():
    """(current / proximal) x (proximal / behaviour) = current / behaviour, whatever the proximal policy."""
    batch, logprobs = make_batch()
    settings = {"clip_low": 1e9, "clip_high": 1e9}
    decoupled = GRPO(correction_cap=None, **settings)
    plain = GRPO(correction="none", **settings)
    ready = decoupled.prepare(batch)
    close(
        loss_of(decoupled, ready, logprobs),
        loss_of(plain, replace(ready, proximal_logprobs=None), logprobs),
    )


def test_where_the_proximal_policy_drew_the_tokens_the_correction_is_exactly_1():
    batch, logprobs = make_batch()
    for proximal in (None, batch.behaviour_logprobs):
        ready = GRPO().prepare(replace(batch, proximal_logprobs=proximal))
        losses = [loss_of(GRPO(correction=kind), ready, logprobs) for kind in ("none", "truncated", "masked")]
        assert losses[0] == losses[1] == losses[2]


def test_the_sequence_ratio_with_one_advantage_an_answer_has_the_gradient_of_gspo():
    """The token form equals the answer's: d/d theta of min(s A, clip(s) A), with s differentiated whole."""
    settings = {"ratio_level": "sequence", "loss_mean": "sequence", "correction": "none", "clip_low": 0.1}
    algorithm = GRPO(**settings)
    batch, logprobs = make_batch()
    batch = algorithm.prepare(batch)
    logprobs.requires_grad_()
    (found,) = torch.autograd.grad(loss_of(algorithm, batch, logprobs), logprobs)
    mean = ((logprobs - batch.proximal_logprobs) * batch.mask).sum(-1) / batch.lengths
    advantage = batch.advantages[:, 0]
    gain = torch.minimum(mean.exp() * advantage, mean.exp().clamp(0.9, 1.2) * advantage)
    close(found, torch.autograd.grad(-gain.mean(), logprobs)[0])


def test_stopped_gradient_of_cispo():
    algorithm = GRPO(surrogate="cispo", clip_low=0.1, clip_high=0.1, correction="none")
    batch, logprobs = make_batch()
    batch = algorithm.prepare(batch)
    logprobs.requires_grad_()
    (found,) = torch.autograd.grad(loss_of(algorithm, batch, logprobs), logprobs)
    weight = (logprobs - batch.proximal_logprobs).exp().clamp(0.9, 1.1)
    close(found, (-weight * batch.advantages * batch.mask / batch.mask.sum()).detach())


def one_answer(logprobs: torch.Tensor, **more: torch.Tensor) -> Batch:
    """Two tokens of three, whose behaviour log-probs are 0."""
    return Batch(
        rewards=tensor(1.0),
        groups=torch.tensor([0]),
        mask=torch.tensor([[True, True, False]]),
        behaviour_logprobs=torch.zeros_like(logprobs),
        limits=torch.tensor([4]),
        is_truncated=torch.tensor([False]),
        **{"advantages": torch.ones_like(logprobs), **more},
    )


def test_metrics_by_hand():
    logprobs = rows([math.log(1.5), math.log(0.9), 7.0])
    output = PolicyOutput(logprobs=logprobs, entropy=rows([0.4, 0.2, 9]))
    _, metrics = GRPO().loss(one_answer(logprobs), output, Totals(num_tokens=2, num_samples=1))
    expected = {
        "clip_ratio/high_mean": 0.5,
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/region_mean": 0.5,
        "sampling/importance_sampling_ratio/min": 0.9,
        "sampling/importance_sampling_ratio/max": 1.5,
        "sampling/importance_sampling_ratio/mean": 1.2,
        "sampling/sampling_logp_difference/mean": (math.log(1.5) - math.log(0.9)) / 2,
        "sampling/sampling_logp_difference/max": math.log(1.5),
        "sampling/sampling_logp_difference/precision": (math.log(1.5) - math.log(0.9)) / 2,
        "sampling/sampling_logp_difference/age": 0.0,
        "sampling/bounded_frac": 0.0,
        # k3 of each: 1.5 - 1 - log 1.5 and 0.9 - 1 - log 0.9
        "off_policy/kl": (0.5 - math.log(1.5) - 0.1 - math.log(0.9)) / 2,
        "entropy": 0.3,
        "loss": -(1.2 + 0.9) / 2,
    }
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected)


@pytest.mark.parametrize(("level", "bounded"), [("token", 0.5), ("sequence", 1.0)])
def test_metrics_of_a_correction_by_hand(level, bounded):
    # The trainer gave the first token 3 times the probability, which counts 2 times; the update has moved on to 1.1.
    proximal = rows([math.log(3), 0.0, 0.0])
    logprobs = proximal + math.log(1.1)
    batch = one_answer(logprobs, proximal_logprobs=proximal)
    algorithm = GRPO(correction_level=level)
    loss, metrics = algorithm.loss(batch, output_of(logprobs), Totals(num_tokens=2, num_samples=1))
    assert float(loss) == pytest.approx(-1.1 * (2 + (1 if level == "token" else 2)) / 2)
    assert metrics["sampling/bounded_frac"] == bounded
    assert float(metrics["sampling/importance_sampling_ratio/max"]) == pytest.approx(3)
    assert float(metrics["off_policy/kl"]) == pytest.approx(1.1 - 1 - math.log(1.1))
    free = GRPO(correction="none").loss(batch, output_of(logprobs), Totals(num_tokens=2, num_samples=1))[1]
    assert free["sampling/bounded_frac"] == 0


def test_shares_of_clipped_tokens_by_hand():
    """Only those that lose their gradient: with dual clip also high ratios of bad tokens."""
    logprobs = rows([math.log(0.5), math.log(0.5), math.log(3), math.log(3)])
    mask = torch.ones(1, 4, dtype=torch.bool)
    batch = replace(one_answer(logprobs, advantages=rows([1, -1, 1, -1])), mask=mask)
    for dual_clip, region in ((None, 0.5), (2.0, 0.75)):
        algorithm = GRPO(dual_clip=dual_clip)
        _, metrics = algorithm.loss(batch, output_of(logprobs), Totals(num_tokens=4, num_samples=1))
        shares = [float(metrics[f"clip_ratio/{name}_mean"]) for name in ("low", "high", "region")]
        assert shares == [0.25, 0.25, region]


# -- a step ----------------------------------------------------------------------------------------------------------


def test_truncated_answers_leave_the_loss_but_not_the_group():
    batch, logprobs = make_batch()
    masking, plain = GRPO(mask_truncated=True), GRPO()
    ready, usual = masking.prepare(batch), plain.prepare(batch)
    assert not ready.mask[0].any()
    assert torch.equal(ready.mask[1:], batch.mask[1:])
    close(ready.advantages, usual.advantages)
    logprobs.requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(masking, ready, logprobs), logprobs)
    assert gradient[0].abs().max() == 0
    assert gradient[1].abs().max() > 0
    # The mean is over the tokens that are left.
    (full,) = torch.autograd.grad(loss_of(plain, usual, logprobs), logprobs)
    close(gradient[1:] * ready.mask.sum(), full[1:] * usual.mask.sum())


def test_a_step_of_truncated_answers_alone_teaches_nothing():
    batch, logprobs = make_batch()
    batch = replace(batch, is_truncated=torch.ones(6, dtype=torch.bool))
    for settings in ({}, {"loss_mean": "sequence", "surrogate": "cispo"}, {"whiten": True}):
        ready = GRPO(mask_truncated=True, **settings).prepare(batch)
        loss = loss_of(GRPO(**settings), ready, logprobs.requires_grad_())
        assert loss == 0
        assert torch.autograd.grad(loss, logprobs)[0].abs().max() == 0


def test_overlong_answers_are_worth_less():
    batch, _ = make_batch()
    # Lengths 5, 2, 3, 1, 4, 5 of 5, 5, 7, 7, 6, 6; over the last half: (2.5 - 5) / 2.5, ..., (3 - 4) / 3, (3 - 5) / 3.
    less = GRPO(overlong_fraction=0.5, overlong_weight=2.0).scores(batch) - batch.rewards
    close(less, tensor(-2, 0, 0, 0, -2 / 3, -4 / 3))
    assert GRPO().scores(batch) is batch.rewards


def test_whitened_advantages_are_over_tokens():
    ready = GRPO(whiten=True, scale="none").prepare(make_batch()[0])
    counted = ready.advantages[ready.mask]
    assert float(counted.mean()) == pytest.approx(0, abs=1e-12)
    assert float(counted.var()) == pytest.approx(1, rel=1e-5)
    assert ready.advantages[~ready.mask].abs().sum() == 0


def penalised(**settings: object) -> GRPO:
    return GRPO(kl_coef=0.5, kl_in="reward", kl_estimator="k1", **settings)


def test_the_divergence_in_the_reward_by_hand():
    batch, _ = make_batch()
    algorithm = penalised(baseline="none", scale="none")
    divergence = (batch.proximal_logprobs - batch.reference_logprobs) * batch.mask
    close(algorithm.kl_penalties(batch), 0.5 * divergence)
    # Of a token: the reward less what it and those behind it diverge.
    expected = batch.rewards[:, None] - 0.5 * divergence.flip(-1).cumsum(-1).flip(-1)
    close(algorithm.prepare(batch).advantages, expected)
    # With a baseline: the answer's reward less its whole divergence, compared with the group's.
    of_answer = batch.rewards - 0.5 * divergence.sum(-1)
    compared = penalised(scale="none").prepare(batch).advantages
    close(compared[0], ((of_answer[0] - of_answer[1]) / 2).expand(5))
    metrics = algorithm.metrics(batch)
    expected = {"kl": float(divergence.sum() / batch.mask.sum()), "kl_coef": 0.5, "sampling/nonfinite_tokens": 0}
    assert metrics == pytest.approx(expected)


def test_a_divergence_in_the_reward_is_not_in_the_loss():
    batch, logprobs = make_batch()
    ready = penalised().prepare(batch)
    close(loss_of(penalised(), ready, logprobs), loss_of(GRPO(), ready, logprobs))
    assert "kl" not in penalised().loss(ready, output_of(logprobs), totals_of(ready))[1]


class Reads(GRPO):
    """Reads log-probs of the policy before the update in its advantages."""

    def advantages(self, batch):
        return super().advantages(batch) * (batch.old_logprobs > -1)


def test_who_reads_old_logprobs_before_the_loss_declares_it():
    assert all("proximal_in_loss" in kind().needs for kind in (GRPO, PPO, Reads))
    assert GRPO(kl_coef=0.1, kl_in="reward").needs == {"proximal", "reference"}
    batch, _ = make_batch()
    Reads().prepare(batch)
    with pytest.raises(ValueError, match="needs proximal, not proximal_in_loss"):
        Reads().prepare(replace(batch, awaits_proximal=torch.ones(len(batch), dtype=torch.bool)))


def test_a_users_token_loss_is_the_loss():
    class Plain(GRPO):
        def token_loss(self, ratio, advantages, logprobs):
            return -advantages * logprobs

    batch, logprobs = make_batch()
    ready = GRPO(correction="none").prepare(batch)
    expected = -(ready.advantages * logprobs * ready.mask).sum() / ready.mask.sum()
    close(loss_of(Plain(correction="none"), ready, logprobs), expected)


def test_a_divergence_that_is_of_tokens_is_not_left_out_of_a_scale():
    with pytest.raises(ValueError, match="^scale='batch': expected none with baseline=none and kl_in=reward"):
        GRPO(baseline="none", scale="batch", kl_coef=0.1, kl_in="reward")


def test_a_step_stops_beyond_the_divergence():
    assert not GRPO().stops({"off_policy/kl": 1e9})
    assert GRPO(max_kl=0.1).stops({"off_policy/kl": 0.11})
    assert not GRPO(max_kl=0.1).stops({"off_policy/kl": 0.09})


@pytest.mark.parametrize(
    ("algorithm", "needs"),
    [
        (GRPO(), {"proximal_in_loss"}),
        (GRPO(correction="none"), set()),
        (GRPO(correction="none", kl_coef=0.1), {"reference"}),
        (PPO(kl_coef=0.1), {"proximal", "reference", "values"}),
        (PPO(correction="none"), {"values"}),
    ],
)
def test_what_it_needs(algorithm, needs):
    assert algorithm.needs == needs


def test_an_entropy_bonus_is_trained():
    assert "entropy_gradient" in GRPO(entropy_coef=0.1).needs
    batch, logprobs = make_batch()
    batch = GRPO().prepare(batch)
    entropy = torch.rand_like(logprobs).requires_grad_()
    GRPO(entropy_coef=0.1).loss(batch, output_of(logprobs, entropy), totals_of(batch))[0].backward()
    close(entropy.grad, -0.1 * batch.mask.double() / batch.mask.sum())
