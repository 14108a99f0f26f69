"""The first test of every scheduler: it changes speed and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rhymerl import FIFOScheduler
from rhymerl.schedulers import HistoPipeScheduler, PacedScheduler, PackedScheduler, SortedScheduler
from tests.integration.training import Run, Trained

NUM_STEPS = 6
RUN = Run(num_steps=NUM_STEPS, prompts_per_step=3, stop_token_ids=(3, 5))  # two steps are an epoch


@pytest.fixture(scope="module")
def fifo() -> Trained:
    torch.set_num_threads(1)
    return RUN.train(scheduler=FIFOScheduler())


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
def test_six_steps_draw_the_same_tokens_and_end_in_the_same_weights(fifo, scheduler):
    weights, steps = fifo
    other_weights, other_steps = RUN.train(scheduler=scheduler)
    assert len({len(sample) for step in steps for sample in step}) > 3
    for number, (samples, others) in enumerate(zip(steps, other_steps, strict=True)):
        for sample, other in zip(samples, others, strict=True):
            assert sample.completion.request.id == other.completion.request.id, number
            assert np.array_equal(sample.completion.token_ids, other.completion.token_ids), number
    for name, weight in weights.items():
        torch.testing.assert_close(other_weights[name], weight, rtol=0, atol=1e-9)
