"""Log-probs of the policy before the update: computed by a pass, known already, or found by the update itself."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rhymerl.algos import GRPO
from rhymerl.algos.base import Algorithm, Batch
from rhymerl.models.critic import CriticSettings
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.updater import Updater
from rhymerl.types import Sample
from tests.training.updates import ActorCritic, first_policy, run_update, scored


def test_only_answers_with_tokens_of_another_policy_are_passed_over_for_the_proximal_one():
    samples, made = scored(12), ActorCritic()
    stale = [0, max(range(12), key=lambda i: len(samples[i]))]
    samples = [sampled_by(sample, 1, last=0 if i in stale else 1) for i, sample in enumerate(samples)]
    run_update(samples, algorithm=lambda: made, critic=CriticSettings(), steps=2, draws_exactly=True)
    first, second = made.prepared
    assert not (first.proximal_logprobs == first.behaviour_logprobs)[first.mask].any()
    is_known = second.proximal_logprobs == second.behaviour_logprobs
    for i, (known, mask) in enumerate(zip(is_known, second.mask, strict=True)):
        assert known[mask].all() if i not in stale else not known[mask].any()


@pytest.mark.parametrize("micro_batch_tokens", [60, 10_000])
def test_the_only_update_of_a_step_finds_the_proximal_logprobs_by_itself(micro_batch_tokens):
    class WithAPass(GRPO):
        needs = frozenset({"proximal"})

    samples = scored(12)
    switches = {"correction_cap": 1.5, "correction_floor": 0.5, "clip_low": 0.01, "clip_high": 0.01}
    settings = {"steps": 2, "micro_batch_tokens": micro_batch_tokens}
    with_pass, expected = run_update(samples, algorithm=lambda: WithAPass(**switches), **settings)
    without, found = run_update(samples, algorithm=lambda: GRPO(**switches), **settings)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for one, other in zip(with_pass.parameters(), without.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_what_the_policy_has_sampled_itself_is_known_also_to_the_only_update():
    class Looking(GRPO):
        def loss(self, batch, output, totals):
            looked.append((batch, output.logprobs.detach()))
            return super().loss(batch, output, totals)

    samples = scored(12)
    stale = [0, max(range(12), key=lambda i: len(samples[i]))]
    samples = [sampled_by(sample, 0, last=-1 if i in stale else 0) for i, sample in enumerate(samples)]
    looked: list[tuple[Batch, Tensor]] = []
    run_update(samples, algorithm=Looking, draws_exactly=True, micro_batch_tokens=60)
    own = [(b.proximal_logprobs[i], o[i], b.behaviour_logprobs[i], b.mask[i]) for b, o in looked for i in range(len(b))]
    is_own = [torch.equal(proximal[mask], ours[mask]) for proximal, ours, _, mask in own]
    is_known = [torch.equal(proximal[mask], sampled[mask]) for proximal, _, sampled, mask in own]
    assert (sum(is_own), sum(is_known)) == (2, 10)
    looked.clear()
    run_update([sampled_by(sample, 0, last=0) for sample in samples], algorithm=Looking, draws_exactly=True)
    assert all(batch.proximal_logprobs is None for batch, _ in looked)


def test_with_dropout_the_proximal_logprobs_are_of_a_pass_without():
    samples, looked = scored(8), []

    class Looking(GRPO):
        def loss(self, batch, output, totals):
            looked.append(torch.equal(batch.proximal_logprobs[batch.mask], output.logprobs.detach()[batch.mask]))
            return super().loss(batch, output, totals)

    run_update(samples, algorithm=Looking, dropout=0.0)
    run_update(samples, algorithm=Looking, dropout=0.3)
    assert looked == [True, False]


def test_with_several_updates_or_a_divergence_in_the_reward_there_is_a_pass():
    def timed(algorithm: Algorithm, **settings: int) -> bool:
        model = copy.deepcopy(first_policy().model)
        update = UpdateSettings(**settings)
        optimizer = update.optimizer(list(model.parameters()))
        parts = {"temperature": 1.0, "seed": 0, "backward": Tensor.backward, "autocast": nullcontext}
        updater = Updater(model, algorithm, update, reference=first_policy().model, **parts)
        metrics = updater.run(scored(4), 0, optimizer=optimizer, schedule=update.schedule(optimizer, 1))
        return "timing_s/old_log_prob" in metrics

    assert not timed(GRPO())
    assert timed(GRPO(), epochs=2)
    assert timed(GRPO(), mini_batches=2)
    assert timed(GRPO(kl_coef=0.1, kl_in="reward"))
    assert not timed(GRPO(kl_coef=0.1))


def sampled_by(sample: Sample, version: int, *, last: int) -> Sample:
    """Return the sample with policy versions, that of its last token apart."""
    versions = np.full(len(sample), version, np.int32)
    versions[-1] = last
    generated = replace(sample.completion.output, policy_versions=versions)
    return replace(sample, completion=replace(sample.completion, output=generated))
