"""The update of episodes, beside one of sampled tokens alone: replies are read, but earn and learn nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from rhymerl.algos import GRPO, PPO, Algorithm, Batch
from rhymerl.models.critic import Critic, CriticSettings
from rhymerl.training.batches import step_batch
from rhymerl.types import Sample, TurnEnd
from tests.algos.twin import plain_advantages
from tests.distributed.threads import run_ranks
from tests.products import pairs_first
from tests.training.test_shared_prefixes import ALONE, gradients, policy_of
from tests.training.updates import norm_in_double, scored

CRITIC = CriticSettings(head_std=0.3)
TURN_WEIGHT, GAMMA, LAMBDA, CAP = 0.5, 0.9, 0.8, 2.0


@pytest.fixture(autouse=True)
def norms_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_double)


def episode(sample: Sample, source: np.random.Generator) -> Sample:
    """Make an episode of an answer: some of its tokens are replies. Whatever turns earn is a part of its reward."""
    length, turns, place = len(sample), [], 0
    while length - place > 2 and len(turns) < 3:
        start = int(source.integers(place + 1, length - 1))
        stop = int(source.integers(start, length))  # a reply may have no tokens
        turns.append(TurnEnd(start=start, stop=stop, text="", reward=[None, -1.0, 0.25, 2.0][source.integers(4)]))
        place = stop
    if source.integers(2):  # the environment had the last word
        turns.append(TurnEnd(start=length, stop=length, text="", reward=1.5))
    whole = sample.completion.output
    bare = replace(whole, turns=tuple(turns))
    output = replace(bare, logprobs=np.where(bare.sampled, whole.logprobs, 0.0))
    earned = sum(turn.reward or 0.0 for turn in turns)
    return replace(
        sample,
        completion=replace(sample.completion, output=output),
        reward=sample.reward + TURN_WEIGHT * earned,
        loss_mask=output.sampled,
        turn_weight=TURN_WEIGHT,
    )


@pytest.fixture(scope="module")
def episodes() -> list[Sample]:
    """Groups of four that begin alike."""
    source = np.random.default_rng(7)
    made = [episode(sample, source) for sample in scored(16, alike=True)]
    assert sum(len(each.completion.output.turns) > 1 for each in made) > 5
    assert sum(int((~each.loss_mask).sum()) for each in made) > 30
    return made


def ids_of(sample: Sample) -> Tensor:
    return torch.from_numpy(np.concatenate([sample.prompt.token_ids, sample.completion.token_ids])).long()[None]


def sampled_of(sample: Sample, values: Tensor) -> list[Tensor]:
    return [values[place] for place in np.flatnonzero(sample.loss_mask)]


def logprobs_of(model: Any, sample: Sample) -> Tensor:
    """Of the tokens of one answer by itself, [L]."""
    ids, first = ids_of(sample), len(sample.prompt.token_ids)
    logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1] / 0.9
    return logits.log_softmax(-1).gather(-1, ids[0, first:, None])[:, 0]


def plain_rewards(sample: Sample) -> list[float]:
    """By sampled token: a turn's where it ends, and what else the episode earned at its very last one."""
    turns, counted = sample.completion.output.turns, np.flatnonzero(sample.loss_mask).tolist()
    rewards = [0.0] * len(counted)
    for turn in turns:
        last = max(place for place in counted if place < turn.start)
        rewards[counted.index(last)] += TURN_WEIGHT * (turn.reward or 0.0)
    rewards[-1] += sample.reward - TURN_WEIGHT * sum(turn.reward or 0.0 for turn in turns)
    return rewards


class Plain:
    """The advantages of sampled tokens, and the loss, answer by answer."""

    def __init__(self, samples: Sequence[Sample], critic: Critic | None) -> None:
        self.samples, self.critic = samples, critic
        self.model = policy_of().model
        self.values: list[list[Tensor]] = []
        if critic is not None:
            states = [critic.body(input_ids=ids_of(each), use_cache=False).last_hidden_state[0] for each in samples]
            firsts = [len(each.prompt.token_ids) - 1 for each in samples]
            values = [critic.head(state)[first:-1] for state, first in zip(states, firsts, strict=True)]
            self.values = [sampled_of(each, value) for each, value in zip(samples, values, strict=True)]

    def advantages(self) -> list[list[float]]:
        if self.critic is not None:
            values = [[value.item() for value in line] for line in self.values]
            rewards = [plain_rewards(sample) for sample in self.samples]
            return plain_advantages(rewards, values, gamma=GAMMA, gae_lambda=LAMBDA)
        found = []
        for i, sample in enumerate(self.samples):
            group = [each.reward for each in self.samples[i - i % 4 : i - i % 4 + 4]]
            mean = sum(group) / 4
            deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group) / 3) + 1e-4
            found.append([(sample.reward - mean) / deviation] * int(sample.loss_mask.sum()))
        return found

    def loss(self) -> Tensor:
        """The policy has not moved yet, so that each ratio is 1; tokens of other policies are weighted up to a cap."""
        advantages = self.advantages()
        total, count = torch.zeros((), dtype=torch.float64), sum(map(len, advantages))
        for i, (sample, line) in enumerate(zip(self.samples, advantages, strict=True)):
            logprobs = sampled_of(sample, logprobs_of(self.model, sample))
            behaviour = sample.completion.logprobs[sample.loss_mask].tolist()
            for t, (logprob, advantage) in enumerate(zip(logprobs, line, strict=True)):
                weight = min(math.exp(logprob.item() - behaviour[t]), CAP)
                total = total - weight * advantage * (logprob - logprob.detach()).exp() / count
                if self.critic is not None:
                    value = self.values[i][t]
                    returned = advantage + value.item()
                    total = total + 0.5 * 0.5 * (value - returned) ** 2 / count
        return total


class Kept:
    """Keeps the batch of a step, with its advantages."""

    kept: Batch

    def prepare(self, batch: Batch) -> Batch:
        self.kept = super().prepare(batch)  # type: ignore[misc]
        return self.kept


class KeptPPO(Kept, PPO):
    pass


class KeptGRPO(Kept, GRPO):
    pass


ALGORITHMS: dict[str, tuple[Callable[[], Algorithm], CriticSettings | None]] = {
    "ppo": (lambda: KeptPPO(gamma=GAMMA, gae_lambda=LAMBDA, whiten=False), CRITIC),
    "grpo": (KeptGRPO, None),
}


def assert_same_gradients(
    updated: Callable[..., Any], loss: Tensor, expected: Sequence[Tensor], *, num_ranks: int
) -> None:
    """The update has this loss and these gradients on each of its ranks."""
    threads = torch.get_num_threads()
    results = [updated()] if num_ranks == 1 else run_ranks(num_ranks, updated)
    torch.set_num_threads(threads)
    for (found,), metrics in results:
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-12, rel=1e-12)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-12 * max(1.0, float(other.abs().max())), rtol=0)


@pytest.mark.parametrize(
    ("name", "micro_batch_tokens", "shares", "num_ranks"),
    pairs_first(ALGORITHMS.keys(), [1, 60, 10**6], [False, True], [1, 2]),
)
def test_advantages_loss_and_gradients_are_those_of_the_sampled_tokens_alone(
    episodes, name, micro_batch_tokens, shares, num_ranks
):
    make, settings = ALGORITHMS[name]
    critic = settings.build(policy_of(), seed=2).train() if settings is not None else None
    plain = Plain(episodes, critic)
    models = [plain.model, *([critic] if critic is not None else [])]
    loss = plain.loss()
    expected = torch.autograd.grad(loss, [p for model in models for p in model.parameters()])
    made = [make() for _ in range(num_ranks)]

    def updated(ranks: Any = ALONE) -> Any:
        return gradients(
            episodes,
            shares=shares,
            algorithm=lambda: made[ranks.rank],
            critic=settings,
            ranks=ranks,
            micro_batch_tokens=micro_batch_tokens,
        )

    assert_same_gradients(updated, loss, expected, num_ranks=num_ranks)
    for each in made:
        for line, sample, wanted in zip(each.kept.advantages, episodes, plain.advantages(), strict=True):
            torch.testing.assert_close(
                line[: len(sample)][torch.from_numpy(sample.loss_mask)], line.new_tensor(wanted), atol=1e-12, rtol=0
            )


def test_without_a_reward_that_sums_them_turns_earn_nothing_by_themselves(episodes):
    assert step_batch([replace(sample, turn_weight=0.0) for sample in episodes], 0).turn_rewards is None
    batch = step_batch(episodes, 0)
    assert (batch.turn_rewards != 0).sum() > 10
    assert not batch.turn_rewards[~batch.mask].any()
