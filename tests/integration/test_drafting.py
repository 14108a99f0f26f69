"""Training with any drafter: the same tokens in every step, the same weights at the end."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from rhymerl import PromptDataModule, RhymeModule
from rhymerl.budgets import AIMDBudget, Budget, FixedBudget, GoodputBudget
from rhymerl.drafters import Drafter, HistoryTreeDrafter, NGramDrafter, NoDrafter
from rhymerl.rollout import RolloutSettings
from rhymerl.testing import RandomTreeDrafter, tiny_policy
from rhymerl.types import Sample
from rhymerl.update import UpdateSettings

NUM_STEPS = 20
PROMPTS = [{"prompt": f"{i}+{i}=?\n", "answer": str(2 * i)} for i in range(6)]
REWARD = "tests.integration.rewards.digits"


class Recorder(L.Callback):
    """The samples of every step."""

    def __init__(self) -> None:
        self.steps: list[list[Sample]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: RhymeModule, *rest: Any) -> None:  # type: ignore[override]
        assert pl_module.last_rollout is not None
        self.steps.append(pl_module.last_rollout.samples)


def train(drafter: Drafter, budget: Budget | None = None) -> tuple[dict[str, torch.Tensor], list[list[Sample]]]:
    """Weights and samples of 20 steps: three of 2 prompts x 4 answers are an epoch."""
    module = RhymeModule(
        tiny_policy(dtype="float64", context=64, peaked=2.0),
        rollout=RolloutSettings(group_size=4, max_tokens=16),
        update=UpdateSettings(learning_rate=3e-3),
        drafter=drafter,
        budget=budget,
        rewards=REWARD,
    )
    recorder = Recorder()
    trainer = L.Trainer(
        max_steps=NUM_STEPS,
        callbacks=[recorder],
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, PromptDataModule(PROMPTS, prompts_per_step=2))
    return {name: weight.detach().clone() for name, weight in module.state_dict().items()}, recorder.steps


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, torch.Tensor], list[list[Sample]]]:
    torch.set_num_threads(1)
    return train(NoDrafter())


@pytest.mark.parametrize(
    ("drafter", "budget"),
    [
        (HistoryTreeDrafter(), None),
        (HistoryTreeDrafter(deterministic=True), GoodputBudget(deterministic=True)),
        (HistoryTreeDrafter(max_branches=1, priority="reward"), AIMDBudget()),
        (NGramDrafter(min_match=1), FixedBudget(4)),
        (RandomTreeDrafter(), FixedBudget(8)),
    ],
    ids=["history_tree", "deterministic", "chain", "ngram", "random trees"],
)
def test_twenty_steps_draw_the_same_tokens_and_end_in_the_same_weights(plain, drafter, budget):
    weights, steps = plain
    drafted_weights, drafted_steps = train(drafter, budget)
    assert len(steps) == len(drafted_steps) == NUM_STEPS
    for step, drafted in zip(steps, drafted_steps, strict=True):
        for sample, other in zip(step, drafted, strict=True):
            np.testing.assert_array_equal(sample.completion.token_ids, other.completion.token_ids)
    for name, weight in weights.items():
        torch.testing.assert_close(drafted_weights[name], weight, rtol=0, atol=1e-9)
    num_accepted = sum(sample.completion.num_accepted for step in drafted_steps for sample in step)
    assert num_accepted > 20, "nothing was tested"
