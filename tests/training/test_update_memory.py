"""The peak memory of the update: a vocabulary costs its head and four chunks of logits, a length nothing."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from benchmarks.update.shared_prefixes import MB, peak_bytes, sample_of
from rhymerl.algos import GRPO
from rhymerl.testing import make_requests, tiny_policy
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.updater import Updater

HIDDEN, CHUNK_TOKENS, STEP_TOKENS, PROMPT_TOKENS = 32, 64, 256, 8


def update_twice(vocabulary: int, length: int) -> None:
    """Take two optimizer steps, with an entropy bonus, so that the head's gradient has all its terms."""
    context = length + PROMPT_TOKENS
    sizes = {"hidden_size": HIDDEN, "context": context, "vocab_size": vocabulary}
    model = tiny_policy(dtype="float32", tied=True, peaked=1.0, **sizes).model.train()
    settings = UpdateSettings(chunk_tokens=CHUNK_TOKENS, micro_batch_tokens=STEP_TOKENS, learning_rate=1e-3)
    optimizer = settings.optimizer(list(model.parameters()))
    updater = Updater(
        model,
        GRPO(scale="batch", entropy_coef=0.01),
        settings,
        temperature=1.0,
        seed=0,
        backward=torch.Tensor.backward,
        autocast=nullcontext,
    )
    requests = make_requests(max(2, STEP_TOKENS // length), prompt_tokens=(PROMPT_TOKENS, PROMPT_TOKENS))
    answer = np.full(length, 2, np.int32)
    samples = [sample_of(each.prompt, n, answer, reward=float(n % 2)) for n, each in enumerate(requests)]
    schedule = settings.schedule(optimizer, 2)
    for step in range(2):
        updater.run(samples, step, optimizer=optimizer, schedule=schedule)


def peak_mb(vocabulary: int, length: int) -> float:
    return peak_bytes(lambda: update_twice(vocabulary, length)) / MB


def test_a_vocabulary_costs_its_head_and_four_chunks_of_logits() -> None:
    small, large = (peak_mb(vocabulary, 128) for vocabulary in (1_000, 150_000))
    weights, chunk = (4 * 150_000 * rows / MB for rows in (HIDDEN, CHUNK_TOKENS))
    assert 4 * weights + 2 * chunk < large - small <= 4 * weights + 4 * chunk


def test_a_length_costs_no_logits() -> None:
    """The logits of 448 more tokens would be ten times as much; activations of the longer sample are in it."""
    short, long = (peak_mb(50_000, length) for length in (64, 512))
    assert long - short < 0.1 * 4 * 50_000 * 448 / MB


def test_the_measure_sees_a_peak() -> None:
    def work() -> None:
        for _ in range(3):
            torch.zeros(1000, 1000)

    assert peak_bytes(work) == pytest.approx(4e6, rel=0.01)
