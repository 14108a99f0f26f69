"""The update: no split of a mini-batch changes the step, schedules by hand, settings checked."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from rhymerl.algos import GRPO
from rhymerl.errors import ConfigError
from rhymerl.logprobs import policy_output, token_batch
from rhymerl.ranks import Ranks
from rhymerl.testing import tiny_policy
from rhymerl.types import Completion, Generated, RolloutRequest, Sample
from rhymerl.update import Updater, UpdateSettings, step_batch
from tests.test_logprobs import make_samples


def scored(count: int) -> list[Sample]:
    """Groups of four samples with random rewards and behaviour log-probs."""
    source = np.random.default_rng(3)
    samples = make_samples(count)
    result = []
    for i, sample in enumerate(samples):
        prompt = samples[i - i % 4].prompt
        request = RolloutRequest(
            id=str(i), prompt=prompt, sample=i % 4, seed=i, sampling=sample.completion.request.sampling
        )
        generated = Generated(
            token_ids=sample.completion.token_ids,
            logprobs=-source.random(len(sample)) * 5,
            policy_versions=np.zeros(len(sample), np.int32),
        )
        completion = Completion(request=request, generated=generated, finish_reason="stop")
        reward = float(source.integers(2))
        result.append(Sample(completion=completion, text="", reward=reward, rewards={}, loss_mask=sample.loss_mask))
    return result


@functools.cache
def first_model(attention_dropout: float = 0.0) -> nn.Module:
    """What every run starts from a copy of."""
    return tiny_policy(attention_dropout=attention_dropout).model.train()


def run_update(
    samples: list[Sample],
    *,
    algorithm: type[GRPO] = GRPO,
    steps: int = 1,
    kl_coef: float = 0.0,
    normalize_std: bool = True,
    dropout: float = 0.0,
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    ranks: Ranks | None = None,
    **settings: float,
) -> tuple[nn.Module, dict[str, float]]:
    """The same samples as `steps` rollout steps in a row, from the same model; with the last step's metrics."""
    model = copy.deepcopy(first_model(dropout))
    update = UpdateSettings(**{"learning_rate": 1e-3, **settings})
    optimizer = update.optimizer(list(model.parameters()))
    schedule = update.schedule(optimizer, 10)
    updater = Updater(
        model,
        algorithm(clip_low=5, clip_high=50, kl_coef=kl_coef, normalize_std=normalize_std),
        update,
        temperature=0.9,
        seed=1,
        backward=backward,
        autocast=nullcontext,
        no_sync=no_sync,
        reference=first_model(dropout) if kl_coef else None,
        ranks=ranks,
    )
    metrics = [dict(updater.run(samples, step, optimizer=optimizer, schedule=schedule)) for step in range(steps)]
    return model, metrics[-1]


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("micro_batch_tokens", [1, 60, 200])
def test_micro_batches_change_neither_weights_nor_metrics(micro_batch_tokens, kl_coef):
    samples = scored(16)
    # Two mini-batches, so that the second starts from weights that the first has moved.
    whole, expected = run_update(samples, kl_coef=kl_coef, mini_batches=2, micro_batch_tokens=10**6)
    split, metrics = run_update(
        samples, kl_coef=kl_coef, mini_batches=2, micro_batch_tokens=micro_batch_tokens, chunk_tokens=3
    )
    for left, right in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-10, rtol=0)
    assert metrics == pytest.approx(expected, rel=1e-9)
    assert ("kl" in metrics) == (kl_coef > 0)


def test_the_update_moves_the_policy_towards_what_was_rewarded():
    samples = scored(16)
    before, after = tiny_policy().model, run_update(samples, learning_rate=1e-4)[0]
    batch = step_batch(samples, GRPO())
    with torch.no_grad():
        old, new = (policy_output(m, token_batch(samples, "cpu"), temperature=0.9).logprobs for m in (before, after))
    assert ((new - old) * batch.advantages * batch.mask).sum() > 0


def test_gradient_norm_is_clipped_and_reported():
    samples = scored(8)
    free, metrics = run_update(samples, max_grad_norm=0)
    clipped, limited = run_update(samples, max_grad_norm=1e-3 * metrics["grad_norm"])
    assert limited["grad_norm"] == pytest.approx(metrics["grad_norm"])
    left, right = (next(iter(m.parameters())).grad.norm() for m in (clipped, free))
    assert left == pytest.approx(1e-3 * float(right), rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1, 1]),
        ({"lr_schedule": "linear"}, [1, 0.75, 0.5, 0.25, 0]),
        ({"lr_schedule": "linear", "min_lr_ratio": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"lr_schedule": "cosine", "warmup_steps": 2}, [0.5, 1, 1, 0.5, 0]),
    ],
)
def test_schedules_by_hand(settings, expected):
    update = UpdateSettings(learning_rate=2.0, **settings)
    optimizer = update.optimizer([nn.Parameter(torch.zeros(2, 2))])
    schedule = update.schedule(optimizer, 4)
    rates = []
    for _ in range(5):
        rates.append(schedule.get_last_lr()[0] / 2)
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(expected)


def test_biases_and_norms_do_not_decay():
    model = tiny_policy().model
    optimizer = UpdateSettings(weight_decay=0.1).optimizer(list(model.parameters()))
    for group in optimizer.param_groups:
        assert all((p.ndim > 1) == (group["weight_decay"] > 0) for p in group["params"])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mini_batches": 0}, "update.mini_batches=0: expected at least 1"),
        ({"learning_rate": -1.0}, "update.learning_rate=-1.0"),
        ({"lr_schedule": "cubic"}, "update.lr_schedule='cubic': expected constant, linear or cosine"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        UpdateSettings(**settings)
