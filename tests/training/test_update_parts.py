"""The update of episodes in parts, beside one in which each part is a row by itself with the episode's advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from rhymerl.models.logprobs import token_batch
from rhymerl.models.shared_prefixes import place_runs
from rhymerl.training.batches import micro_batches
from rhymerl.types import Sample, Segment
from tests.products import pairs_first
from tests.training import test_update_turns as turns
from tests.training.test_shared_prefixes import ALONE, gradients, policy_of
from tests.training.updates import norm_in_double, scored


@pytest.fixture(autouse=True)
def norms_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_double)


def in_parts(sample: Sample, source: np.random.Generator) -> Sample:
    """Let about half of the replies begin another part; none has only tokens that were said before."""
    output = sample.completion.output
    ended = tuple(
        replace(turn, rerendered=int(source.integers(turn.stop - turn.start)))
        if turn.start < turn.stop < len(output) and source.integers(2)
        else turn
        for turn in output.turns
    )
    return replace(sample, completion=replace(sample.completion, output=replace(output, turns=ended)))


@pytest.fixture(scope="module")
def episodes() -> list[Sample]:
    source = np.random.default_rng(5)
    made = [in_parts(turns.episode(sample, source), source) for sample in scored(16, alike=True)]
    assert {len(sample.segments) for sample in made} >= {1, 2, 3}
    return made


def ids_of(part: Segment) -> Tensor:
    return torch.from_numpy(np.concatenate([part.prompt, part.token_ids])).long()[None]


def over_parts(sample: Sample, of_part: Callable[[Segment], Tensor]) -> Tensor:
    """Put what there is of each part's tokens at their places in the answer; the prompts of parts have zeros."""
    found, place = list[Tensor](), 0
    for part in sample.segments:
        found += [torch.zeros(part.start - place, dtype=torch.float64), of_part(part)]
        place = part.start + len(part.token_ids)
    return torch.cat(found)


def logprobs_of(model: Any, sample: Sample) -> Tensor:
    def of_part(part: Segment) -> Tensor:
        ids, first = ids_of(part), len(part.prompt)
        logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1] / 0.9
        return logits.log_softmax(-1).gather(-1, ids[0, first:, None])[:, 0]

    return over_parts(sample, of_part)


class PlainParts(turns.Plain):
    """As `Plain`, with a row for each part."""

    def __init__(self, samples, critic):
        super().__init__(samples, None)
        self.critic = critic

        def of_part(part: Segment) -> Tensor:
            states = critic.body(input_ids=ids_of(part), use_cache=False).last_hidden_state[0]
            return critic.head(states)[len(part.prompt) - 1 : -1]

        if critic is not None:
            self.values = [turns.sampled_of(each, over_parts(each, of_part)) for each in samples]


@pytest.mark.parametrize(
    ("name", "micro_batch_tokens", "shares", "num_ranks"),
    pairs_first(turns.ALGORITHMS.keys(), [1, 60, 10**6], [False, True], [1, 2]),
)
def test_loss_and_gradients_are_those_of_parts_as_rows_with_the_episodes_advantages(
    episodes, name, micro_batch_tokens, shares, num_ranks, monkeypatch
):
    monkeypatch.setattr(turns, "logprobs_of", logprobs_of)
    make, settings = turns.ALGORITHMS[name]
    critic = settings.build(policy_of(), seed=2).train() if settings is not None else None
    plain = PlainParts(episodes, critic)
    models = [plain.model, *([critic] if critic is not None else [])]
    loss = plain.loss()
    expected = torch.autograd.grad(loss, [p for model in models for p in model.parameters()])

    def updated(ranks: Any = ALONE) -> Any:
        asked = {"critic": settings, "ranks": ranks, "micro_batch_tokens": micro_batch_tokens}
        return gradients(episodes, shares=shares, algorithm=make, **asked)

    turns.assert_same_gradients(updated, loss, expected, num_ranks=num_ranks)


def test_no_micro_batch_computes_more_than_it_may(episodes):
    for most in (60, 100, 200, 400):
        for shares in (False, True):
            for part in micro_batches(episodes, range(len(episodes)), most, shares=shares):
                samples = [episodes[i] for i in part]
                if len(part) > 1 and not shares:
                    assert token_batch(samples, "cpu").input_ids.numel() <= most
                if len(part) > 1 and shares:
                    parts = [each for sample in samples for each in sample.segments]
                    layout = place_runs([each.prompt for each in parts], [each.token_ids[:-1] for each in parts], "cpu")
                    prompts = len({each.prompt.tobytes() for each in parts}) * max(len(each.prompt) for each in parts)
                    assert layout.layout.sizes[0] == prompts <= most
