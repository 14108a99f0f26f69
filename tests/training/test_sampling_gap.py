"""What sampling and training log-probs differ by: precision, age of the weights, and truncation that is replayed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rhymerl.algos import GRPO, Batch, PolicyOutput, Totals
from rhymerl.algos.metrics import sampling
from rhymerl.testing import tiny_policy
from rhymerl.training.batches import step_batch
from rhymerl.types import Sample
from tests.algos.batches import WIDTH, make_batch, output_of, rows, totals_of
from tests.engine.test_grid import sample
from tests.training.test_replay import in_double, sampled  # noqa: F401  # a fixture
from tests.training.test_update_proximal import sampled_by
from tests.training.updates import run_update

GAP = "sampling/sampling_logp_difference"


def parts_of(metrics: Mapping[str, Tensor | float]) -> list[float]:
    """Precision, age, truncation, and the mean; NaN for what there is not."""
    names = (f"{GAP}/{name}" for name in ("precision", "age", "truncation", "mean"))
    return [float(metrics.get(name, math.nan)) for name in names]


def stale_batch(seed: int = 0) -> tuple[Batch, Tensor]:
    batch, logprobs = make_batch(seed)
    source = np.random.default_rng(seed)
    is_stale = torch.from_numpy(source.random(batch.mask.shape) < 0.5)
    log_masses = torch.from_numpy(-source.random(batch.mask.shape))
    return replace(batch, is_stale=is_stale, log_masses=log_masses), logprobs


def test_the_parts_by_hand():
    """Four tokens, of which the update sees three; the second and the third are of an earlier policy."""
    batch = Batch(
        rewards=torch.ones(1),
        groups=torch.zeros(1).long(),
        mask=torch.tensor([[True, True, True, False]]),
        behaviour_logprobs=rows([-1.0, -2.0, -3.0, -4.0]),
        limits=torch.tensor([4]),
        is_truncated=torch.tensor([False]),
        is_stale=torch.tensor([[False, True, True, False]]),
        log_masses=rows([math.log(0.5), 0.0, math.log(0.25), math.nan]),
    )
    logprobs, totals = rows([-1.25, -1.5, -4.0, math.nan]), Totals(num_tokens=3, num_samples=1)
    found = parts_of(sampling(logprobs, batch, totals))
    assert found == pytest.approx([0.25 / 3, 1.5 / 3, 3 * math.log(2) / 3, 1.75 / 3], rel=1e-12)
    known = replace(batch, proximal_logprobs=rows([-1.0, -2.5, -3.0, math.nan]))
    assert parts_of(sampling(logprobs, known, totals))[:2] == pytest.approx([0.0, 0.5 / 3], rel=1e-12)
    unknown = replace(batch, is_stale=None, log_masses=None)
    assert parts_of(sampling(logprobs, unknown, totals)) == pytest.approx(
        [1.75 / 3, 0.0, math.nan, 1.75 / 3], rel=1e-12, nan_ok=True
    )


def test_parts_add_up_over_sources_and_micro_batches():
    for seed in range(100):
        batch, logprobs = stale_batch(seed)
        totals = totals_of(batch)
        precision, age, truncation, mean = parts_of(sampling(logprobs, batch, totals))
        assert precision + age == pytest.approx(mean, rel=1e-12)
        split = [parts_of(sampling(logprobs[i], batch.select(i, WIDTH), totals)) for i in torch.arange(6).split(4)]
        assert np.sum(split, axis=0) == pytest.approx([precision, age, truncation, mean], rel=1e-12)


def test_weights_that_have_moved_are_others_than_those_that_sampled():
    batch, logprobs = stale_batch()
    batch = GRPO().prepare(batch)
    output: PolicyOutput = output_of(logprobs)
    known = [parts_of(GRPO().loss(each, output, totals_of(batch))[1]) for each in (batch, batch.after_update())]
    assert known[0] == known[1], "both are of policies that do not move"
    moved = replace(batch, proximal_logprobs=None).after_update()
    precision, age, _, mean = parts_of(GRPO().loss(moved, output, totals_of(batch))[1])
    assert precision == 0 < age == mean


def drawn(*, replay: bool = True, **truncation: float) -> list[Sample]:
    found = sampled(tiny_policy(), count=12, temperature=0.9, replay=replay, **truncation)
    return [sample(each) for each in found.values()]


def test_in_float64_one_policy_has_no_gap_but_the_one_that_replay_takes_out(in_double):  # noqa: F811
    samples = drawn(top_p=0.8)
    precision, age, truncation, mean = parts_of(run_update(samples)[1])
    assert 0 <= precision == mean < 1e-12
    assert age == 0
    noted = np.concatenate([each.completion.output.log_masses for each in samples])
    assert truncation == pytest.approx(-noted.mean(), rel=1e-12)
    assert truncation > 0.05, "the case is too easy: hardly anything was cut off"
    for untold in (drawn(replay=False, top_p=0.8), drawn()):
        assert math.isnan(parts_of(run_update(untold)[1])[2])


def forgetting(one: Sample) -> Sample:
    """The sample without what truncation had left at its tokens."""
    return replace(one, completion=replace(one.completion, output=replace(one.completion.output, kept=None)))


def test_masses_stand_at_their_tokens_and_are_0_where_nothing_is_known() -> None:
    first, *others = drawn(top_p=0.8)
    samples = [forgetting(first), *others]
    found = step_batch(samples, 1).log_masses
    assert found is not None
    for row, each in zip(found.numpy(), samples, strict=True):
        expected = each.completion.output.log_masses
        np.testing.assert_array_equal(row, np.pad(expected, (0, len(row) - len(expected))))
    assert not found[0].any()
    assert found[1:].any()


def test_without_replay_the_ratio_would_be_off_by_that_part(in_double):  # noqa: F811
    """The whole policy is trained, on tokens that the truncated one has sampled."""
    samples = drawn(top_p=0.8)
    truncation = parts_of(run_update(samples)[1])[2]
    assert parts_of(run_update([forgetting(each) for each in samples])[1]) == pytest.approx(
        [truncation, 0.0, math.nan, truncation], rel=1e-9, nan_ok=True
    )


def test_tokens_of_earlier_weights_have_all_of_the_gap(in_double):  # noqa: F811
    samples = drawn()
    first, second = (parts_of(run_update(samples, steps=steps, learning_rate=1e-2)[1]) for steps in (1, 2))
    assert first[3] < 1e-12
    assert second[0] == 0
    assert second[1] == second[3] > 1e-3
    mixed = [sampled_by(each, 1, last=i % 2) for i, each in enumerate(samples)]
    assert step_batch(mixed, 1).is_stale.sum() == 6
    precision, age, _, mean = parts_of(run_update(mixed, steps=2, learning_rate=1e-2)[1])
    assert precision + age == pytest.approx(mean, rel=1e-12)
    assert min(precision, age) > 0


def test_later_mini_batches_of_a_step_are_of_other_weights(in_double):  # noqa: F811
    precision, age, _, mean = parts_of(run_update(drawn(), draws_exactly=True, mini_batches=3, learning_rate=1e-2)[1])
    assert precision < 1e-12
    assert age == pytest.approx(mean, rel=1e-9)
    assert age > 1e-3
