"""The update: no split of a mini-batch changes the step, schedules by hand, settings checked."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rhymerl.algos import GRPO
from rhymerl.algos.base import Algorithm, Batch, PolicyOutput, Totals
from rhymerl.distributed import Ranks
from rhymerl.errors import ConfigError
from rhymerl.models.critic import CriticSettings
from rhymerl.models.logprobs import policy_output, token_batch
from rhymerl.models.policy import Policy
from rhymerl.models.sharding import replicate, shard
from rhymerl.rollout import RolloutSettings
from rhymerl.testing import tiny_policy
from rhymerl.training.batches import step_batch
from rhymerl.training.checks import check_algorithm
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.updater import Updater
from rhymerl.types import Completion, Output, RolloutRequest, Sample
from tests.models.test_logprobs import make_samples


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
        generated = Output(
            token_ids=sample.completion.token_ids,
            logprobs=-source.random(len(sample)) * 5,
            policy_versions=np.zeros(len(sample), np.int32),
        )
        completion = Completion(request=request, output=replace(generated, finish_reason="stop"))
        reward = float(source.integers(2))
        result.append(Sample(completion=completion, text="", reward=reward, rewards={}, loss_mask=sample.loss_mask))
    return result


class ActorCritic(Algorithm):
    """Reads all that there is: every pass, values with a gradient, an entropy that is trained, what a step adapts."""

    needs = frozenset({"proximal", "reference", "values"})
    trains_entropy = True

    def __init__(self, *, value_coef: float = 0.5) -> None:
        self.value_coef = value_coef
        self.num_steps = 0
        self.prepared: list[Batch] = []

    def advantages(self, batch: Batch) -> Tensor:
        return (batch.rewards[:, None] - batch.values).masked_fill(~batch.mask, 0)

    def prepare(self, batch: Batch) -> Batch:
        self.prepared.append(replace(super().prepare(batch), returns=batch.rewards[:, None].expand_as(batch.values)))
        return self.prepared[-1]

    def loss(self, batch: Batch, output: PolicyOutput, totals: Totals) -> tuple[Tensor, Mapping[str, Tensor]]:
        ratio = (output.logprobs - batch.proximal_logprobs).exp()
        pull = (output.logprobs - batch.reference_logprobs) ** 2
        wrong = (output.values - batch.returns) ** 2
        each = -ratio * batch.advantages + 0.1 * pull - 0.1 * output.entropy + self.value_coef * wrong
        # Of the first token and of each sample, so that both totals are needed.
        loss = (
            each.masked_fill(~batch.mask, 0).sum() / totals.num_tokens + output.values[:, 0].sum() / totals.num_samples
        )
        kept = {"ratio": ratio, "wrong": wrong, "values": output.values}
        return loss, {name: (it.detach() * batch.mask).sum() / totals.num_tokens for name, it in kept.items()}

    def metrics(self, batch: Batch) -> dict[str, float]:
        self.num_steps += 1
        return {"num_steps": float(self.num_steps)}


def forgiving_grpo(**settings: float) -> GRPO:
    """Whose ratios are hardly ever clipped."""
    return GRPO(clip_low=5, clip_high=50, **settings)


@functools.cache
def first_policy(attention_dropout: float = 0.0) -> Policy:
    """Return the policy of which every run starts from a copy."""
    policy = tiny_policy(attention_dropout=attention_dropout)
    policy.model.train()
    return policy


def run_update(
    samples: list[Sample],
    *,
    algorithm: Callable[[], Algorithm] = forgiving_grpo,
    critic: CriticSettings | None = None,
    steps: int = 1,
    dropout: float = 0.0,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    ranks: Ranks | None = None,
    draws_exactly: bool = False,
    mesh: DeviceMesh | None = None,
    **settings: float,
) -> tuple[nn.ModuleDict, dict[str, float]]:
    """The same samples as `steps` rollout steps in a row, from the same model; with the last step's metrics but for times.

    Returns what was trained: `model` and, if there is one, `critic`; sharded over a `mesh`, as the reference is.
    """
    made = algorithm()
    model = copy.deepcopy(first_policy(dropout).model)
    update = UpdateSettings(**{"learning_rate": 1e-3, **settings})
    trained = nn.ModuleDict({"model": model})
    if critic is not None:
        trained["critic"] = critic.build(first_policy(dropout), seed=2)
    reference = first_policy(dropout).model if "reference" in made.needs else None
    if mesh is not None:
        reference = copy.deepcopy(reference)
        for each in (model, reference, trained["critic"].body if critic is not None else None):
            if each is not None:
                shard(each, mesh)
        if critic is not None:
            replicate(trained["critic"].head, mesh)
    optimizer = update.optimizer(list(model.parameters()), critic=trained["critic"] if critic is not None else None)
    schedule = update.schedule(optimizer, 10)
    updater = Updater(
        model,
        made,
        update,
        temperature=0.9,
        seed=1,
        backward=backward,
        autocast=nullcontext,
        draws_exactly=draws_exactly,
        reference=reference,
        critic=trained["critic"] if critic is not None else None,
        ranks=ranks,
    )
    metrics = [dict(updater.run(samples, step, optimizer=optimizer, schedule=schedule)) for step in range(steps)]
    return trained, {name: value for name, value in metrics[-1].items() if not name.startswith("timing_s/")}


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("micro_batch_tokens", [1, 60, 200])
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
    batch = step_batch([*samples[:2], replace(samples[2], completion=cut), samples[3]])
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


def test_activation_checkpointing_is_refused_for_a_model_that_has_none(monkeypatch):
    model = copy.deepcopy(first_policy().model)
    update = UpdateSettings(activation_checkpointing=True)
    update.check(model, 64)
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match="update.activation_checkpointing=true: Qwen2ForCausalLM does not support it"):
        update.check(model, 64)


def test_the_update_moves_the_policy_towards_what_was_rewarded():
    samples = scored(16)
    before, after = tiny_policy().model, run_update(samples, learning_rate=1e-4)[0]["model"]
    batch = GRPO().prepare(step_batch(samples))
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


@pytest.mark.parametrize("shared", [False, True])
def test_the_policys_schedule_begins_when_it_begins_to_move(shared):
    """Two rollout steps of a critic's warm-up, of two optimizer steps each; then two of the policy's own."""
    update = UpdateSettings(learning_rate=2.0, lr_schedule="linear", warmup_steps=2, mini_batches=2)
    policy = tiny_policy()
    critic = CriticSettings(shared=shared, learning_rate=0.5, warmup_steps=2).build(policy, seed=0)
    optimizer = update.optimizer(list(policy.model.parameters()), critic=critic)
    schedule = update.schedule(optimizer, 10, critic=critic)
    rates = []
    for _ in range(10):
        rates.append((schedule.get_last_lr()[0] / 2, schedule.get_last_lr()[-1] / 0.5))
        optimizer.step()
        schedule.step()
    of_policy, of_critic = zip(*rates, strict=True)
    assert of_policy == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.5, 1, 1, 0.75, 0.5, 0.25])
    assert of_critic == pytest.approx([0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


def test_dropout_is_warned_of(caplog):
    UpdateSettings().warn(first_policy().model)
    assert not caplog.records
    UpdateSettings().warn(first_policy(0.3).model)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "update.micro_batch_tokens" in caplog.text


@pytest.mark.parametrize(
    ("words", "told"),
    [("group_size=8: odd", "rollout.group_size=8: odd"), ("clip=2: too wide", "algo: clip=2: too wide")],
)
def test_what_an_algorithm_refuses_is_named_by_where_it_stands(words, told):
    class Refusing(GRPO):
        def check(self, *, group_size):
            raise ValueError(words)

    with pytest.raises(ValueError, match=f"^{told}"):
        check_algorithm(Refusing(), rollout=RolloutSettings(), update=UpdateSettings())


@pytest.mark.parametrize("settings", [{"epochs": 2}, {"mini_batches": 2}])
def test_a_bound_on_the_divergence_needs_several_updates(settings):
    check_algorithm(GRPO(), rollout=RolloutSettings(), update=UpdateSettings())
    check_algorithm(GRPO(max_kl=0.1), rollout=RolloutSettings(), update=UpdateSettings(**settings))
    with pytest.raises(ValueError, match=r"^algo.max_kl=0.1 .*update.epochs=1 and update.mini_batches=1"):
        check_algorithm(GRPO(max_kl=0.1), rollout=RolloutSettings(), update=UpdateSettings())


def test_biases_and_norms_do_not_decay():
    model = tiny_policy().model
    optimizer = UpdateSettings(weight_decay=0.1).optimizer(list(model.parameters()))
    for group in optimizer.param_groups:
        assert all((p.ndim > 1) == (group["weight_decay"] > 0) for p in group["params"])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mini_batches": 0}, "^mini_batches=0: expected at least 1"),
        ({"epochs": 0}, "^epochs=0: expected at least 1"),
        ({"learning_rate": -1.0}, "^learning_rate=-1.0"),
        ({"lr_schedule": "cubic"}, "^lr_schedule='cubic': expected constant, linear or cosine"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        UpdateSettings(**settings)


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
