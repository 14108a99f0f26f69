"""Training with any drafter: the same tokens in every step, the same weights at the end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rhymerl.budgets import AIMDBudget, FixedBudget, GoodputBudget
from rhymerl.drafters import HistoryTreeDrafter, NGramDrafter, NoDrafter
from rhymerl.testing import RandomTreeDrafter
from tests.integration.training import Run, Trained

NUM_STEPS = 10
RUN = Run(num_steps=NUM_STEPS, prompts_per_step=2)  # three steps are an epoch


@pytest.fixture(scope="module")
def plain() -> Trained:
    torch.set_num_threads(1)
    return RUN.train(drafter=NoDrafter())


@pytest.mark.parametrize(
    ("drafter", "budget"),
    [
        (HistoryTreeDrafter(), FixedBudget(8)),
        (HistoryTreeDrafter(deterministic=True), GoodputBudget(deterministic=True, costs=((1, 1.0), (512, 1.1)))),
        pytest.param(HistoryTreeDrafter(max_branches=1, priority="reward"), AIMDBudget(), marks=pytest.mark.slow),
        pytest.param(NGramDrafter(min_match=1), FixedBudget(4), marks=pytest.mark.slow),
        (RandomTreeDrafter(), FixedBudget(8)),
    ],
    ids=["history_tree", "deterministic", "chain", "ngram", "random trees"],
)
def test_ten_steps_draw_the_same_tokens_and_end_in_the_same_weights(plain, drafter, budget):
    weights, steps = plain
    drafted_weights, drafted_steps = RUN.train(drafter=drafter, budget=budget)
    assert len(steps) == len(drafted_steps) == NUM_STEPS
    for step, drafted in zip(steps, drafted_steps, strict=True):
        for sample, other in zip(step, drafted, strict=True):
            np.testing.assert_array_equal(sample.completion.token_ids, other.completion.token_ids)
    for name, weight in weights.items():
        torch.testing.assert_close(drafted_weights[name], weight, rtol=0, atol=1e-9)
    num_accepted = sum(sample.completion.num_accepted for step in drafted_steps for sample in step)
    assert num_accepted > NUM_STEPS, f"nothing was tested: {num_accepted}"
