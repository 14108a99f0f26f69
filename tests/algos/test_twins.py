"""From logits to the loss once more, in NumPy and plain Python, over random batches.

In them some answers have no reward, some behaviour log-probs are no numbers, others are far apart, and tokens were
sampled from sets that truncation left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rhymerl.algos import GRPO, PPO, Batch, Distill, PolicyGradient, PolicyOutput
from rhymerl.models.head import KeptTokens, ReferenceHead, head_logprobs
from rhymerl.models.logits import PLAIN
from tests.algos.batches import NUM_SAMPLES, WIDTH, totals_of
from tests.algos.test_guards import BROKEN, COMPARED
from tests.algos.test_policy_gradient import SETTINGS, of_family
from tests.algos.twin import (
    plain_advantages,
    plain_divergence,
    plain_group_advantages,
    plain_loss,
    plain_value_loss,
    plain_whitened,
)

VOCABULARY, HIDDEN, TEMPERATURE = 11, 4, 0.8
FAMILIES = ("grpo", "reward", "ppo", "distill", "vocabulary")
Lines = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A head, and its states in front of all tokens."""

    hidden: torch.Tensor
    head: nn.Linear

    @classmethod
    def near(cls, source: np.random.Generator, other: Model | None, spread: float) -> Model:
        def noise(*shape: int) -> torch.Tensor:
            return torch.from_numpy(source.normal(size=shape))

        head = nn.Linear(HIDDEN, VOCABULARY, dtype=torch.float64)
        with torch.no_grad():
            head.weight.copy_(noise(VOCABULARY, HIDDEN) if other is None else other.head.weight)
            head.weight += spread * noise(VOCABULARY, HIDDEN)
        return cls(hidden=noise(NUM_SAMPLES * WIDTH, HIDDEN) if other is None else other.hidden, head=head)

    def plain_log_softmax(self, sets: list[list[int]]) -> np.ndarray:
        """Over each token's set, [N, V], with -inf outside."""
        weight, bias = self.head.weight.detach().numpy(), self.head.bias.detach().numpy()
        logits = (self.hidden.numpy() @ weight.T + bias) / TEMPERATURE
        is_in = np.array([[not each or token in each for token in range(VOCABULARY)] for each in sets])
        top = np.where(is_in, logits, -np.inf).max(-1, keepdims=True)
        total = (np.exp(logits - top) * is_in).sum(-1, keepdims=True)
        return np.where(is_in, logits - top - np.log(total), -np.inf)


def random_sets(source: np.random.Generator, targets: np.ndarray) -> list[list[int]]:
    """Sets with the tokens themselves in them; an empty one is the whole vocabulary."""
    sets = [sorted({int(target), *np.flatnonzero(source.random(VOCABULARY) < 0.4).tolist()}) for target in targets]
    return [[] if source.random() < 0.3 else each for each in sets]


def random_algorithm(source: np.random.Generator, family: str, number: int) -> PolicyGradient:
    settings: dict[str, Any] = SETTINGS[number % len(SETTINGS)]
    compared: dict[str, Any] = COMPARED[int(source.integers(len(COMPARED)))]
    level = {"kl_in": "reward", "kl_coef": 0.3, "kl_estimator": ("k1", "k2", "k3")[number % 3]}
    switch = bool(source.integers(2))
    if family == "ppo":
        critic = {"gamma": 0.9, "gae_lambda": 0.8, "value_clip": 0.3 if switch else None, "whiten": switch}
        return PPO(**{**of_family(settings, PPO), **critic, **level})
    if family in ("distill", "vocabulary"):
        alone = {name: value for name, value in settings.items() if not name.startswith("kl_")}
        over: Any = "vocabulary" if family == "vocabulary" else "sampled"
        return Distill(**{**alone, **compared}, over=over, reward_weight=0.5 * switch)
    if family == "reward":
        scale = {"scale": "none"} if compared["baseline"] == "none" else {}
        return GRPO(**{**settings, **compared, **level, **scale})
    return GRPO(**{**settings, **compared})


def plain_scores(algorithm: Any, batch: Batch, counted: list[list[int]]) -> tuple[list[float], Lines]:
    """What answers are compared by, and what the divergence takes off the reward of each counted token."""
    old, reference = batch.proximal_logprobs.tolist(), batch.reference_logprobs.tolist()
    coefficient = algorithm.kl_coef if algorithm.kl_in == "reward" else 0.0
    penalties = [
        [coefficient * plain_divergence(algorithm, old[i][t], reference[i][t]) for t in tokens]
        for i, tokens in enumerate(counted)
    ]
    return batch.rewards.tolist(), penalties


def twin_advantages(algorithm: Any, batch: Batch, counted: list[list[int]]) -> tuple[Lines, Lines]:
    """The advantages of all counted tokens, and what the critic learns."""
    scores, penalties = plain_scores(algorithm, batch, counted)
    if isinstance(algorithm, PPO):
        earned = [[-penalty for penalty in line] for line in penalties]
        for line, score in zip(earned, scores, strict=True):
            if line:
                line[-1] += score
        values = [[float(batch.values[i, t]) for t in tokens] for i, tokens in enumerate(counted)]
        found = plain_advantages(earned, values, gamma=algorithm.gamma, gae_lambda=algorithm.gae_lambda)
        returns = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(found, values, strict=True)]
        return plain_whitened(found) if algorithm.whiten else found, returns
    by_token = algorithm.baseline == "none"
    if not by_token:
        scores = [score - sum(line) for score, line in zip(scores, penalties, strict=True)]
    of_answers = plain_group_advantages(scores, batch.groups.tolist(), algorithm)
    weight = algorithm.reward_weight if isinstance(algorithm, Distill) else 1.0
    found = []
    for i, tokens in enumerate(counted):
        taken = [sum(penalties[i][k:]) if by_token else 0.0 for k in range(len(tokens))]
        line = [weight * (of_answers[i] or 0.0) - each for each in taken]
        if isinstance(algorithm, Distill) and algorithm.over == "sampled":
            gap = (batch.reference_logprobs - batch.proximal_logprobs)[i].tolist()
            line = [each + gap[t] for each, t in zip(line, tokens, strict=True)]
        found.append(line)
    return found, found


def twin_loss(algorithm: Any, batch: Batch, output: PolicyOutput, advantages: Lines, returns: Lines, counted) -> float:
    """`batch` as it was before `prepare`."""
    filled = torch.zeros_like(batch.proximal_logprobs)
    for i, tokens in enumerate(counted):
        filled[i, tokens] = torch.tensor(advantages[i], dtype=torch.float64)
    in_loss = algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0
    settings = SimpleNamespace(**{**vars(algorithm), "kl_coef": in_loss})
    logprobs, entropy = output.logprobs.tolist(), output.entropy.tolist()
    loss = plain_loss(settings, replace(batch, advantages=filled), logprobs, entropy)
    num_tokens = max(1, sum(map(len, counted)))
    if isinstance(algorithm, PPO):
        errors = [
            plain_value_loss(float(output.values[i, t]), float(batch.values[i, t]), returns[i][k], algorithm.value_clip)
            for i, tokens in enumerate(counted)
            for k, t in enumerate(tokens)
        ]
        loss += algorithm.value_coef * sum(errors) / num_tokens
    if isinstance(algorithm, Distill) and algorithm.over == "vocabulary":
        for i, tokens in enumerate(counted):
            divisor = {"token": num_tokens, "sequence": max(1, len(tokens)) * len(batch)}.get(
                algorithm.loss_mean, int(batch.limits[i]) * len(batch)
            )
            loss += sum(float(output.divergence[i, t]) for t in tokens) / divisor
    return loss


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [20, pytest.param(600, marks=pytest.mark.slow)])
def test_losses_are_those_of_numpy(count, family):
    """`count` batches of each family: 3,000 in all, marked slow."""
    num_trained = num_sets = 0
    for number in range(count):
        source = np.random.default_rng([FAMILIES.index(family), number])
        algorithm = random_algorithm(source, family, number)
        shape = (NUM_SAMPLES, WIDTH)
        targets = source.integers(0, VOCABULARY, NUM_SAMPLES * WIDTH)
        sets = random_sets(source, targets) if source.random() < 0.8 else [[]] * len(targets)
        kept = KeptTokens.of([np.array(each, np.int32) for each in sets], "cpu") if any(sets) else None
        num_sets += kept is not None

        behaviour = Model.near(source, None, 0.0)
        policies = [behaviour, *(Model.near(source, behaviour, spread) for spread in (0.1, 0.2, 0.5))]
        judge = ReferenceHead(hidden=policies[-1].hidden, head=policies[-1].head, transform=PLAIN)
        known = []
        for policy in policies:
            common: Any = {"temperature": TEMPERATURE, "chunk_tokens": 7, "kept": kept}
            with torch.no_grad():
                found = head_logprobs(policy.hidden, policy.head, torch.from_numpy(targets), reference=judge, **common)
            lines, theirs = policy.plain_log_softmax(sets), policies[-1].plain_log_softmax(sets)
            chosen = lines[np.arange(len(targets)), targets]
            chance, is_in = np.exp(lines), np.isfinite(lines)
            wanted = chosen, -(chance * np.where(is_in, lines, 0)).sum(-1)
            gap = np.where(is_in, lines, 0) - np.where(is_in, theirs, 0)
            for each, expected in zip(found, (*wanted, (chance * gap).sum(-1)), strict=True):
                np.testing.assert_allclose(each.numpy(), expected, rtol=1e-12, atol=1e-12)
            known.append([each.view(shape) for each in found])

        (sampled, *_), (old, *_), (now, entropy, divergence), (judged, *_) = known
        sampled, old = sampled.clone(), old.clone()
        for i, t in np.argwhere(source.random(shape) < 0.05).tolist():
            sampled[i, t] = source.choice(BROKEN)
        if family != "reward":  # where small differences of large sums would be compared
            for i, t in np.argwhere(source.random(shape) < 0.05).tolist():
                old[i, t] -= source.choice((30.0, 1e3, -1e3))
        values, later = (torch.from_numpy(source.normal(size=shape)) for _ in range(2))
        rewards = [[None, 0.1, 0.3, float(source.random())][source.integers(4)] for _ in range(NUM_SAMPLES)]
        batch = Batch(
            rewards=torch.tensor([math.nan if each is None else each for each in rewards], dtype=torch.float64),
            groups=torch.from_numpy(source.integers(0, 3, NUM_SAMPLES)),
            mask=torch.from_numpy(source.random(shape) < 0.8),
            behaviour_logprobs=sampled,
            proximal_logprobs=old,
            reference_logprobs=judged,
            values=values,
            limits=torch.from_numpy(source.integers(WIDTH, 9, NUM_SAMPLES)),
            is_truncated=torch.zeros(NUM_SAMPLES, dtype=torch.bool),
        )
        rewarded = torch.tensor([i for i in range(NUM_SAMPLES) if rewards[i] is not None], dtype=torch.int64)
        if not len(rewarded):
            continue
        batch = batch.select(rewarded, WIDTH)  # as the update does
        output = PolicyOutput(
            logprobs=now[rewarded], entropy=entropy[rewarded], values=later[rewarded], divergence=divergence[rewarded]
        )
        is_counted = batch.mask & batch.behaviour_logprobs.isfinite()
        counted = [np.flatnonzero(line).tolist() for line in is_counted.numpy()]
        num_trained += sum(map(len, counted))

        prepared = algorithm.prepare(batch)
        assert torch.equal(prepared.mask, is_counted)
        advantages, returns = twin_advantages(algorithm, batch, counted)
        for i, tokens in enumerate(counted):
            found, expected = prepared.advantages[i, tokens].numpy(), np.array(advantages[i])
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
            assert not found[expected == 0].any(), "where all rewards are equal, exactly"
        loss = float(algorithm.loss(prepared, output, totals_of(prepared))[0])
        assert math.isfinite(loss)
        wanted = twin_loss(algorithm, batch, output, advantages, returns, counted)
        assert loss == pytest.approx(wanted, rel=1e-12, abs=1e-12), algorithm
    assert num_trained > 10 * count
    assert num_sets > count / 2
