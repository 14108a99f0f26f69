"""The update: no split of a mini-batch changes the step, schedules by hand, settings checked."""

from __future__ import annotations

import copy
import functools
import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rhymerl.algos import GRPO
from rhymerl.algos.base import Algorithm, Batch
from rhymerl.models.critic import CriticSettings
from rhymerl.models.logprobs import policy_output, token_batch
from rhymerl.testing import tiny_policy
from rhymerl.training.batches import step_batch
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.updater import Updater
from rhymerl.types import Sample
from tests.products import values_first
from tests.training.updates import ActorCritic, first_policy, forgiving_grpo, run_update, scored


@pytest.mark.parametrize(("micro_batch_tokens", "kl_coef"), values_first([1, 60, 200], [0.0, 0.3]))
def test_micro_batches_change_neither_weights_nor_metrics(micro_batch_tokens, kl_coef):
    samples = scored(16)
    # Two mini-batches, so that the second starts from weights that the first has moved.
    algorithm = functools.partial(forgiving_grpo, kl_coef=kl_coef)
    whole, expected = run_update(samples, algorithm=algorithm, mini_batches=2, micro_batch_tokens=10**6)
    split, metrics = run_update(
        samples, algorithm=algorithm, mini_batches=2, micro_batch_tokens=micro_batch_tokens, chunk_tokens=3
    )
    for left, right in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-10, rtol=0)
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert ("kl" in metrics) == (kl_coef > 0)


def test_epochs_are_other_mini_batches_of_the_same_samples():
    samples = [replace(sample, reward=float(i)) for i, sample in enumerate(scored(16))]
    seen: list[float] = []

    class Recording(GRPO):
        def loss(self, batch, output, totals):
            assert totals.num_samples == 8
            seen.extend(batch.rewards.tolist())
            return super().loss(batch, output, totals)

    run_update(samples, algorithm=Recording, epochs=3, mini_batches=2)
    epochs = [seen[start : start + 16] for start in range(0, len(seen), 16)]
    assert [sorted(epoch) for epoch in epochs] == [[sample.reward for sample in samples]] * 3
    assert len({frozenset(epoch[:8]) for epoch in epochs}) == 3


def test_steps_have_other_mini_batches_which_follow_from_the_step():
    samples = [replace(sample, reward=float(i)) for i, sample in enumerate(scored(16))]

    def seen(steps: int) -> list[frozenset[float]]:
        found: list[frozenset[float]] = []

        class Recording(GRPO):
            def loss(self, batch, output, totals):
                found.append(frozenset(batch.rewards.tolist()))
                return super().loss(batch, output, totals)

        run_update(samples, algorithm=Recording, mini_batches=2, micro_batch_tokens=10**6, steps=steps)
        return found[-2:]

    assert seen(1) == seen(1)
    assert set(seen(1)) != set(seen(2))


def test_what_the_mask_leaves_out_is_not_trained():
    samples = scored(8)
    holes = [replace(each, loss_mask=each.loss_mask & (np.arange(len(each)) % 2 == 0)) for each in samples]
    for line, sample in zip(step_batch(holes, 0).mask, holes, strict=True):
        assert line[: len(sample)].tolist() == sample.loss_mask.tolist()
        assert not line[len(sample) :].any()

    def other(sample: Sample) -> Sample:
        output = sample.completion.output
        logprobs = np.where(sample.loss_mask, output.logprobs, output.logprobs - 1.0)
        return replace(sample, completion=replace(sample.completion, output=replace(output, logprobs=logprobs)))

    trained, _ = run_update(holes)
    same, _ = run_update([other(sample) for sample in holes])
    for left, right in zip(trained.parameters(), same.parameters(), strict=True):
        assert torch.equal(left, right)


def test_advantages_are_told_of_the_samples_that_were_trained():
    """Those without a reward are in no batch, so that places in it are not theirs."""
    samples = [replace(each, reward=float("nan")) if i in (0, 5) else each for i, each in enumerate(scored(16))]
    model, update = copy.deepcopy(first_policy().model), UpdateSettings(learning_rate=1e-3)
    made = {"temperature": 1.0, "seed": 1, "backward": torch.Tensor.backward, "autocast": nullcontext}
    updater, optimizer = Updater(model, GRPO(), update, **made), update.optimizer(list(model.parameters()))
    updater.run(samples, 0, optimizer=optimizer, schedule=update.schedule(optimizer, 1))
    found = updater.advantages(range(16))
    assert [i for i, each in enumerate(found) if each is None] == [0, 5]
    for start in range(0, 16, 4):
        group = [i for i in range(start, start + 4) if i not in (0, 5)]
        rewards = np.array([samples[i].reward for i in group])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        assert [found[i] for i in group] == pytest.approx(expected.tolist())


@pytest.mark.parametrize(("after", "taken"), [(1, 1), (3, 3), (9, 6)])
def test_an_algorithm_may_stop_the_step_early(after, taken):
    class Stopping(GRPO):
        def stops(self, metrics):
            asked.append(dict(metrics))
            return len(asked) == after

    asked: list[dict[str, float]] = []
    _, metrics = run_update(scored(16), algorithm=Stopping, epochs=3, mini_batches=2)
    assert len(asked) == taken
    assert metrics["loss"] == pytest.approx(np.mean([each["loss"] for each in asked]))


def test_what_an_algorithm_needs_is_there_before_the_first_mini_batch():
    samples, made = scored(12), ActorCritic()
    _, metrics = run_update(samples, algorithm=lambda: made, critic=CriticSettings(head_std=0.3), steps=2)
    model = first_policy().model
    critic = CriticSettings(head_std=0.3).build(first_policy(), seed=2)
    with torch.no_grad():
        output = policy_output(model, token_batch(samples, "cpu"), temperature=0.9, critic=critic)
    first, second = made.prepared
    for found, expected in (
        (first.proximal_logprobs, output.logprobs),
        (first.reference_logprobs, output.logprobs),
        (second.reference_logprobs, output.logprobs),
        (first.values, output.values),
    ):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
        assert found.dtype == torch.float64
    assert not torch.allclose(second.proximal_logprobs, output.logprobs)
    assert not torch.allclose(second.values, output.values)
    assert metrics["ratio"] == pytest.approx(1)  # one mini-batch
    assert metrics["num_steps"] == 2


def test_the_coefficient_stays_while_only_the_critic_learns():
    adapted = []

    class Adapting(ActorCritic):
        def adapt(self, batch: Batch) -> None:
            adapted.append(len(batch))

    run_update(scored(4), algorithm=Adapting, critic=CriticSettings(warmup_steps=2), steps=3)
    assert adapted == [4]


def test_the_batch_knows_limits_and_which_answers_were_cut_off():
    samples = scored(4)
    whole = samples[2].completion
    cut = replace(whole, output=replace(whole.output, finish_reason="length"))
    batch = step_batch([*samples[:2], replace(samples[2], completion=cut), samples[3]], 0)
    assert batch.is_truncated.tolist() == [False, False, True, False]
    assert batch.limits.tolist() == [sample.completion.request.sampling.max_tokens for sample in samples]


def test_each_pass_is_timed_where_it_occurs():
    def names(algorithm: Algorithm, **parts: object) -> set[str]:
        model = copy.deepcopy(first_policy().model)
        update = UpdateSettings()
        optimizer = update.optimizer(list(model.parameters()))
        updater = Updater(
            model,
            algorithm,
            update,
            temperature=1.0,
            seed=0,
            backward=Tensor.backward,
            autocast=nullcontext,
            **parts,
        )
        metrics = updater.run(scored(4), 0, optimizer=optimizer, schedule=update.schedule(optimizer, 1))
        return {name.removeprefix("timing_s/") for name in metrics if name.startswith("timing_s/")}

    assert names(GRPO(correction="none")) == {"advantage", "update"}
    uncorrected = GRPO(correction="none", kl_coef=0.1)
    assert names(uncorrected, reference=first_policy().model) == {"advantage", "update", "ref"}
    critic = CriticSettings(shared=True).build(first_policy(), seed=0)
    everything = names(ActorCritic(), reference=first_policy().model, critic=critic)
    assert everything == {"advantage", "update", "ref", "old_log_prob", "values"}


@pytest.mark.parametrize("shared", [True, False])
def test_activation_checkpointing_changes_nothing_but_memory(shared):
    samples, outcomes, kept = scored(12), [], [0, 0]
    for on in (0, 1):

        def keep(tensor: Tensor, on: int = on) -> Tensor:
            kept[on] += tensor.nbytes
            return tensor

        critic = CriticSettings(shared=shared, head_std=0.3)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):  # not of what is computed again
            outcomes.append(
                run_update(samples, algorithm=ActorCritic, critic=critic, activation_checkpointing=bool(on))
            )
    (plain, expected), (trained, metrics) = outcomes
    for left, right in zip(trained.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-10, rtol=0)
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert kept[1] < kept[0] / 3
    assert not any(getattr(module, "gradient_checkpointing", False) for module in trained.modules())


def test_activation_checkpointing_leaves_no_hooks():
    trained, _ = run_update(scored(4), activation_checkpointing=True, mini_batches=2, steps=2)
    assert not any(module._forward_hooks for module in trained["model"].modules())


def test_the_update_moves_the_policy_towards_what_was_rewarded():
    samples = scored(16)
    before, after = tiny_policy().model, run_update(samples, learning_rate=1e-4)[0]["model"]
    batch = GRPO().prepare(step_batch(samples, 0))
    with torch.no_grad():
        old, new = (policy_output(m, token_batch(samples, "cpu"), temperature=0.9).logprobs for m in (before, after))
    assert ((new - old) * batch.advantages * batch.mask).sum() > 0


@pytest.mark.parametrize("settings", [{}, {"loss_mean": "sequence"}, {"baseline": "leave_one_out", "scale": "batch"}])
def test_samples_without_a_reward_are_left_out_of_the_update(settings):
    samples = scored(16)
    absent = {2, 4, 5, 6, 7, 13, 14}  # of a group some, all, all but two
    given = [replace(sample, reward=math.nan) if i in absent else sample for i, sample in enumerate(samples)]
    rest = [sample for i, sample in enumerate(samples) if i not in absent]
    one, found = run_update(given, algorithm=lambda: GRPO(**settings), mini_batches=2)
    two, expected = run_update(rest, algorithm=lambda: GRPO(**settings), mini_batches=2)
    assert found == expected
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, two.state_dict()[name]), name


def test_a_step_without_any_reward_moves_nothing():
    samples = [replace(sample, reward=math.nan) for sample in scored(8)]
    trained, metrics = run_update(samples, mini_batches=2)
    assert metrics["grad_norm"] == metrics["loss"] == 0
    before = tiny_policy().model.state_dict()
    for name, weight in trained["model"].state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_gradient_norm_is_clipped_and_reported():
    samples = scored(8)
    free, metrics = run_update(samples, max_grad_norm=0)
    clipped, limited = run_update(samples, max_grad_norm=1e-3 * metrics["grad_norm"])
    assert limited["grad_norm"] == pytest.approx(metrics["grad_norm"])
    left, right = (next(iter(m.parameters())).grad.norm() for m in (clipped, free))
    assert left == pytest.approx(1e-3 * float(right), rel=1e-3)


class Reinforce(Algorithm):
    """The mean over tokens of a reward times a log-prob; knows which samples each mini-batch has, by their rewards."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []

    def advantages(self, batch: Batch) -> Tensor:
        return batch.rewards[:, None].expand_as(batch.mask)

    def loss(self, batch, output, totals):
        self.parts.append([int(reward) for reward in batch.rewards])
        return -(output.logprobs * batch.advantages * batch.mask).sum() / totals.num_tokens, {}


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_each_mini_batch_is_a_step_by_the_mean_over_its_own_tokens(max_grad_norm):
    """Plain gradient descent, by hand: each weight loses 0.1 times the gradient, scaled down to the norm.

    The mini-batches differ in tokens, so a denominator of the whole step would be seen; AdamW would hide it.
    """
    samples = [replace(sample, reward=float(i)) for i, sample in enumerate(scored(9))]
    model, algorithm = copy.deepcopy(first_policy().model), Reinforce()
    update = UpdateSettings(mini_batches=3, max_grad_norm=max_grad_norm, lr_schedule="constant", warmup_steps=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = Updater(model, algorithm, update, temperature=0.9, seed=1, backward=Tensor.backward, autocast=nullcontext)
    updater.run(samples, 0, optimizer=optimizer, schedule=update.schedule(optimizer, 1))
    assert sorted(sum(algorithm.parts, [])) == list(range(9))
    assert len({sum(int(samples[i].loss_mask.sum()) for i in part) for part in algorithm.parts}) > 1

    twin = copy.deepcopy(first_policy().model)
    for part in algorithm.parts:
        mask = step_batch([samples[i] for i in part], 0).mask
        logprobs = policy_output(twin, token_batch([samples[i] for i in part], "cpu"), temperature=0.9).logprobs
        mean = (logprobs * mask * torch.tensor(part)[:, None]).sum() / mask.sum()
        gradients = torch.autograd.grad(mean, list(twin.parameters()))
        norm = float(sum(gradient.pow(2).sum() for gradient in gradients)) ** 0.5
        scale = min(1.0, max_grad_norm / norm) if max_grad_norm else 1.0
        assert (scale < 1) == bool(max_grad_norm)
        with torch.no_grad():
            for weight, gradient in zip(twin.parameters(), gradients, strict=True):
                weight += 0.1 * scale * gradient
    for left, right in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-7, rtol=1e-5)


def test_values_behind_the_last_tokens_are_there_where_they_are_asked_for():
    class Bootstrapping(ActorCritic):
        needs = ActorCritic.needs | {"final_values"}

    samples, made = scored(12), Bootstrapping()
    run_update(samples, algorithm=lambda: made, critic=CriticSettings(head_std=0.3), micro_batch_tokens=100)
    plain = ActorCritic()
    run_update(samples, algorithm=lambda: plain, critic=CriticSettings(head_std=0.3), micro_batch_tokens=100)
    found, expected = made.prepared[0], plain.prepared[0]
    assert expected.final_values is None
    torch.testing.assert_close(found.values, expected.values, atol=1e-12, rtol=0)
    critic = CriticSettings(head_std=0.3).build(first_policy(), seed=2)
    for i, sample in enumerate(samples):
        ids = torch.from_numpy(np.concatenate([sample.prompt.token_ids, sample.completion.token_ids])).long()[None]
        with torch.no_grad():
            states = critic.body.eval()(input_ids=ids, use_cache=False).last_hidden_state
            torch.testing.assert_close(found.final_values[i], critic.head(states[0, -1:])[0], atol=1e-10, rtol=0)
