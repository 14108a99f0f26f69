"""The adaptation of the coefficient of a divergence in the reward, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rhymerl.algos import GRPO
from rhymerl.algos.policy_gradient import PolicyGradient
from tests.algos.batches import make_batch

close = torch.testing.assert_close


def test_the_coefficient_adapts_by_hand():
    batch, _ = make_batch()
    kl = float(((batch.proximal_logprobs - batch.reference_logprobs) ** 2 / 2 * batch.mask).sum() / 6)
    algorithm = GRPO(kl_coef=0.5, kl_in="reward", kl_estimator="k2", kl_target=kl / 1.1)
    # 10 % too much: 0.5 * (1 + 0.1 * 0.1). More than 20 % too much or too little count as 20 %.
    assert algorithm.metrics(batch)["kl_coef"] == algorithm.metrics(batch)["kl_coef"] == 0.5
    algorithm.adapt(batch)
    assert algorithm.metrics(batch)["kl_coef"] == pytest.approx(0.505)
    for target, factor in ((kl / 9, 1.02), (kl * 9, 0.98)):
        algorithm = replace(algorithm, kl_target=target)
        algorithm.adapt(batch)
        assert algorithm.state_dict() == pytest.approx({"kl_coef": 0.5 * factor})
    resumed = replace(algorithm)
    resumed.load_state_dict(algorithm.state_dict())
    close(resumed.kl_penalties(batch), 0.98 * GRPO(kl_coef=0.5, kl_in="reward", kl_estimator="k2").kl_penalties(batch))
    assert resumed.kl_coef == 0.5  # the setting
    fixed = GRPO(kl_coef=0.25, kl_in="reward", kl_estimator="k2")
    fixed.load_state_dict(algorithm.state_dict())
    assert fixed.state_dict() == {"kl_coef": 0.25}


def test_the_divergence_is_summed_once_a_step(monkeypatch):
    asked = []
    monkeypatch.setattr(
        GRPO, "_divergence", lambda self, *args: asked.append(1) or PolicyGradient._divergence(self, *args)
    )
    algorithm = GRPO(kl_coef=0.5, kl_in="reward", kl_estimator="k2", kl_target=1.0)
    batch = algorithm.prepare(make_batch()[0])
    before = len(asked)
    kl = algorithm.metrics(batch)["kl"]
    algorithm.adapt(batch)
    assert len(asked) == before
    expected = ((batch.proximal_logprobs - batch.reference_logprobs) ** 2 / 2)[batch.mask]
    assert kl == pytest.approx(float(expected.mean()))


def test_the_divergence_of_an_answer_is_over_the_answers_that_count():
    batch, _ = make_batch()
    target = {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k2"}
    kept = batch.mask.clone()
    kept[1:] = False
    kl = float(((batch.proximal_logprobs - batch.reference_logprobs) ** 2 / 2 * kept).sum())
    algorithm = GRPO(**target, kl_target=kl / 1.1)
    algorithm.adapt(replace(batch, mask=kept))
    assert algorithm.state_dict() == pytest.approx({"kl_coef": 0.505})
