"""The peak memory of the update: a vocabulary costs its head and four chunks of logits, a length nothing."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SETTINGS = SimpleNamespace(tokens=256, hidden=32, chunk_tokens=64, micro_batch_tokens=256, seed=0)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("update_memory")


def test_a_vocabulary_costs_its_head_and_four_chunks_of_logits(memory: Any) -> None:
    small, large = (memory.measured(vocabulary, 128, SETTINGS) for vocabulary in (1_000, 150_000))
    weights, chunk = (4 * 150_000 * rows / memory.MB for rows in (SETTINGS.hidden, SETTINGS.chunk_tokens))
    assert 4 * weights + 2 * chunk < large - small <= 4 * weights + 4 * chunk


def test_a_length_costs_no_logits(memory: Any) -> None:
    """The logits of 448 more tokens would be ten times as much; activations of the longer sample are in it."""
    short, long = (memory.measured(50_000, length, SETTINGS) for length in (64, 512))
    assert long - short < 0.1 * 4 * 50_000 * 448 / memory.MB


def test_the_measure_sees_a_peak(memory: Any) -> None:
    import torch

    def work() -> None:
        for _ in range(3):
            torch.zeros(1000, 1000)

    assert memory.peak_bytes(work) == pytest.approx(4e6, rel=0.01)
