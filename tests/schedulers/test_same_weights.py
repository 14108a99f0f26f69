"""The first test of every scheduler: it changes speed and nothing else."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from rhymerl import FIFOScheduler, PromptDataModule, RhymeModule, Scheduler
from rhymerl.rollout import RolloutSettings
from rhymerl.schedulers import HistoPipeScheduler, PacedScheduler, PackedScheduler, SortedScheduler
from rhymerl.testing import tiny_policy
from rhymerl.types import Sample
from rhymerl.update import UpdateSettings

NUM_STEPS = 8
PROMPTS = [{"prompt": f"{i}+{i}=?\n", "answer": str(2 * i)} for i in range(6)]


class Recorder(L.Callback):
    """The samples of every step."""

    def __init__(self) -> None:
        self.steps: list[list[Sample]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: RhymeModule, *rest: Any) -> None:  # type: ignore[override]
        assert pl_module.last_rollout is not None
        self.steps.append(pl_module.last_rollout.samples)


def train(scheduler: Scheduler) -> tuple[dict[str, torch.Tensor], list[list[Sample]]]:
    """Weights and samples of eight steps: two of 3 prompts x 4 answers are an epoch."""
    module = RhymeModule(
        tiny_policy(dtype="float64", context=64, peaked=2.0),
        rollout=RolloutSettings(group_size=4, max_tokens=16, stop_token_ids=(3, 5)),
        update=UpdateSettings(learning_rate=3e-3),
        scheduler=scheduler,
        rewards="tests.integration.rewards.digits",
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
    trainer.fit(module, PromptDataModule(PROMPTS, prompts_per_step=3))
    return {name: weight.detach().clone() for name, weight in module.state_dict().items()}, recorder.steps


@pytest.fixture(scope="module")
def fifo() -> tuple[dict[str, torch.Tensor], list[list[Sample]]]:
    torch.set_num_threads(1)
    return train(FIFOScheduler())


@pytest.mark.parametrize(
    "scheduler",
    [
        SortedScheduler(),
        SortedScheduler(order="ascending", keep_groups=False),
        PackedScheduler(),
        HistoPipeScheduler(tier=1),
        HistoPipeScheduler(),
        PacedScheduler(),
    ],
    ids=["descending", "ascending", "packed", "tier 1", "tier 2", "paced"],
)
def test_eight_steps_draw_the_same_tokens_and_end_in_the_same_weights(fifo, scheduler):
    weights, steps = fifo
    other_weights, other_steps = train(scheduler)
    assert len({len(sample) for step in steps for sample in step}) > 3
    for number, (samples, others) in enumerate(zip(steps, other_steps, strict=True)):
        for sample, other in zip(samples, others, strict=True):
            assert sample.completion.request.id == other.completion.request.id, number
            assert np.array_equal(sample.completion.token_ids, other.completion.token_ids), number
    for name, weight in weights.items():
        torch.testing.assert_close(other_weights[name], weight, rtol=0, atol=1e-9)
