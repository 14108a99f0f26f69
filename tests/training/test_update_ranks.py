"""The update over several ranks: the steps, weights and metrics of one rank, however the samples are dealt."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rhymerl.algos import GRPO, Algorithm
from rhymerl.distributed import Alone, Ranks
from rhymerl.distributed.group import Group
from rhymerl.errors import RunError
from rhymerl.models.critic import CriticSettings
from rhymerl.types import Sample
from tests.distributed.threads import run_ranks
from tests.integration.ranked import run_ranks as run_processes
from tests.products import pairs_first
from tests.training.updates import ActorCritic, first_policy, forgiving_grpo, run_update, scored

T = TypeVar("T")


def on_threads(num_ranks: int, work: Callable[[Ranks], T]) -> list[T]:
    """Return what each rank returns."""
    first_policy(0.0)  # made here, as `run_update` asks for it: transformers builds models one at a time
    return run_ranks(num_ranks, work)


def ragged(count: int, *, alike: bool = False) -> list[Sample]:
    """Return samples of which the first of each group of four is not trained on at all and the others in part."""
    source = np.random.default_rng(5)
    return [
        replace(sample, loss_mask=(source.random(len(sample)) < 0.8) & (i % 4 > 0))
        for i, sample in enumerate(scored(count, alike=alike))
    ]


def assert_same_update(model: nn.Module, metrics: dict[str, float], expected: tuple[nn.Module, dict[str, float]]):
    for left, right in zip(model.parameters(), expected[0].parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-10, rtol=0)
        if left.grad is not None or right.grad is not None:  # none while the critic warms up
            torch.testing.assert_close(left.grad, right.grad, atol=1e-10, rtol=0)
    assert metrics == pytest.approx(expected[1], rel=1e-6, abs=1e-7)


def assert_bitwise_equal(models: list[nn.Module]):
    for first, *others in zip(*(model.parameters() for model in models), strict=True):
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("num_ranks", "mini_batches", "micro_batch_tokens"), pairs_first([1, 2, 3], [1, 3], [1, 60, 10**6])
)
def test_ranks_take_the_steps_of_one(num_ranks, mini_batches, micro_batch_tokens):
    samples = ragged(16)
    expected = run_update(samples, steps=2, mini_batches=mini_batches)

    def work(ranks: Ranks) -> tuple[nn.Module, dict[str, float]]:
        return run_update(
            samples, steps=2, mini_batches=mini_batches, micro_batch_tokens=micro_batch_tokens, ranks=ranks
        )

    models, metrics = zip(*on_threads(num_ranks, work), strict=True)
    assert_same_update(models[0], metrics[0], expected)
    assert_bitwise_equal(models)
    assert all(each == metrics[0] for each in metrics)


LOSSES = {
    "kl": {"algorithm": functools.partial(forgiving_grpo, kl_coef=0.3)},
    "no_scale": {"algorithm": functools.partial(forgiving_grpo, scale="none")},
    "clipped": {"max_grad_norm": 1e-3},
    "epochs": {"epochs": 2, "mini_batches": 2},
}


@pytest.mark.parametrize("settings", LOSSES.values(), ids=list(LOSSES))
def test_whatever_the_loss(settings):
    samples = ragged(12)
    expected = run_update(samples, **settings)
    for model, metrics in on_threads(2, lambda ranks: run_update(samples, ranks=ranks, **settings)):
        assert_same_update(model, metrics, expected)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_sample_is_trained_on_once(num_ranks):
    samples = [replace(sample, reward=float(i)) for i, sample in enumerate(scored(16))]
    seen: list[list[float]] = []

    class Recording(GRPO):
        def loss(self, batch, output, totals):
            seen.append(batch.rewards.tolist())
            return super().loss(batch, output, totals)

    on_threads(
        num_ranks,
        lambda ranks: run_update(samples, ranks=ranks, algorithm=Recording, mini_batches=3, micro_batch_tokens=60),
    )
    assert sorted(itertools.chain(*seen)) == [sample.reward for sample in samples]


def test_a_rank_without_samples_takes_part():
    samples = ragged(8)  # mini-batches of two for five ranks
    expected = run_update(samples, mini_batches=4)
    models, metrics = zip(*on_threads(5, lambda ranks: run_update(samples, mini_batches=4, ranks=ranks)), strict=True)
    assert_bitwise_equal(models)
    for model, each in zip(models, metrics, strict=True):
        assert_same_update(model, each, expected)
    assert "sampling/importance_sampling_ratio/min" in metrics[-1]


def test_a_metric_that_only_some_mini_batches_have_is_kept():
    samples = [replace(sample, loss_mask=np.full(len(sample), i == 5)) for i, sample in enumerate(scored(8))]
    ratios = "sampling/importance_sampling_ratio/max"
    alone = run_update(samples, mini_batches=8)[1]
    assert alone[ratios] > 0
    assert all(m == alone for m in on_threads(3, lambda ranks: run_update(samples, mini_batches=8, ranks=ranks)[1]))


class Recorded(Alone):
    """Writes down what is done on the one rank there is."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def gather(self, value):
        self.done.append("gather")
        return [value]

    def sum_gradients(self, parameters):
        self.done.append("sum")

    def backward(self, loss: torch.Tensor) -> None:
        self.done.append("backward")
        loss.backward()


@pytest.mark.parametrize(("shared", "warmup_steps", "num_ranks"), pairs_first([True, False], [0, 1, 2], [1, 2, 3]))
def test_with_a_critic(shared, warmup_steps, num_ranks):
    """Two steps of three mini-batches; the policy takes part in both, in the second alone, or in none."""
    samples = ragged(8)
    critic = CriticSettings(shared=shared, head_std=0.3, learning_rate=1e-2, warmup_steps=warmup_steps)
    settings = {"algorithm": ActorCritic, "critic": critic, "steps": 2, "mini_batches": 3, "epochs": 2}
    expected = run_update(samples, **settings)

    def work(ranks: Ranks) -> tuple[nn.Module, dict[str, float]]:
        return run_update(samples, micro_batch_tokens=40, chunk_tokens=7, ranks=ranks, **settings)

    models, metrics = zip(*on_threads(num_ranks, work), strict=True)
    assert_same_update(models[0], metrics[0], expected)
    assert_bitwise_equal(models)
    assert all(each == metrics[0] for each in metrics)
    moved = not same_weights(
        {"weights": models[0]["model"].state_dict()}, {"weights": first_policy().model.state_dict()}
    )
    assert moved == (warmup_steps < 2)
    assert ("grad_norm" in metrics[0]) == (warmup_steps < 2)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_a_rank_without_samples_takes_part_in_a_critic_too(shared, warmup_steps):
    samples = ragged(8)  # mini-batches of two for three ranks
    critic = CriticSettings(shared=shared, head_std=0.3, warmup_steps=warmup_steps)
    settings = {"algorithm": ActorCritic, "critic": critic, "mini_batches": 4}
    expected = run_update(samples, **settings)
    for model, metrics in on_threads(3, lambda ranks: run_update(samples, ranks=ranks, **settings)):
        assert_same_update(model, metrics, expected)


def test_ranks_stop_together():
    class Stopping(GRPO):
        def stops(self, metrics):
            return metrics["clip_ratio/region_mean"] > 0.1

    settings = {"algorithm": lambda: Stopping(clip_low=1e-6, clip_high=1e-6), "epochs": 4, "mini_batches": 2}
    samples = ragged(8)
    expected = run_update(samples, **settings)
    everything = run_update(samples, **{**settings, "algorithm": lambda: GRPO(clip_low=1e-6, clip_high=1e-6)})
    assert expected[1]["loss"] != everything[1]["loss"]
    for model, metrics in on_threads(3, lambda ranks: run_update(samples, ranks=ranks, **settings)):
        assert_same_update(model, metrics, expected)


def test_one_sum_a_mini_batch_after_all_backwards_and_one_gather_a_step():
    class Steadfast(ActorCritic):
        needs = frozenset()

        def advantages(self, batch):
            return batch.rewards[:, None].expand_as(batch.mask)

        def prepare(self, batch):
            return Algorithm.prepare(self, batch)

        def loss(self, batch, output, totals):
            return (output.logprobs * batch.advantages).sum(), {}

    class Wavering(Steadfast):
        def stops(self, metrics):
            return False

    mini_batch = ["backward", "backward", "backward", "sum"]
    for algorithm, expected in (
        (Steadfast, [*mini_batch, *mini_batch, "gather"]),
        (Wavering, [*mini_batch, "gather", *mini_batch, "gather"]),  # asks after each
    ):
        ranks = Recorded()
        run_update(
            scored(6),
            algorithm=algorithm,
            ranks=ranks,
            mini_batches=2,
            micro_batch_tokens=1,
            backward=ranks.backward,
        )
        assert ranks.done == expected


def test_a_gradient_that_one_rank_breaks_stops_all_of_them():
    samples = [replace(sample, reward=float(i)) for i, sample in enumerate(scored(8))]

    class Breaking(GRPO):
        def loss(self, batch, output, totals):
            loss, metrics = super().loss(batch, output, totals)
            return loss * (np.nan if 3.0 in batch.rewards else 1.0), metrics

    def work(ranks: Ranks) -> bool:
        with pytest.raises(RunError, match="the gradient is not finite"):
            run_update(samples, ranks=ranks, algorithm=Breaking, micro_batch_tokens=1)
        return True

    assert on_threads(3, work) == [True] * 3


def train_in_process(folder: str) -> None:
    """Three updates, the last two of which are the same with dropout; saves what came of them."""
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    samples, ranks = ragged(16), Group()
    outcomes = []
    for dropout in (0.0, 0.3, 0.3):
        model, metrics = run_update(
            samples, steps=3, mini_batches=2, micro_batch_tokens=100, dropout=dropout, ranks=ranks
        )
        outcomes.append({"weights": model.state_dict(), "metrics": metrics, "seed": torch.initial_seed()})
    torch.save(outcomes, Path(folder) / f"{rank}.pt")
    ranks.close()
    dist.destroy_process_group()


def test_two_processes_are_as_good_as_one(tmp_path):
    samples = ragged(16)
    expected, metrics = run_update(samples, steps=3, mini_batches=2)
    seed = torch.initial_seed()
    run_processes(2, train_in_process, str(tmp_path), output=tmp_path / "output")
    (plain, *noisy), others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))

    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(plain["weights"][name], weight, atol=1e-10, rtol=0)
    assert plain["metrics"] == pytest.approx(metrics, rel=1e-6, abs=1e-7)
    for mine, other in zip([plain, *noisy], others, strict=True):
        assert same_weights(mine, other)
        assert mine["metrics"] == other["metrics"]

    # Dropout: rank 0 draws what one rank would, the other something else, and both the same again.
    assert plain["seed"] == seed != others[0]["seed"]
    assert same_weights(*noisy)
    assert not same_weights(plain, noisy[0])


def same_weights(left: dict, right: dict) -> bool:
    return all(torch.equal(weight, right["weights"][name]) for name, weight in left["weights"].items())
