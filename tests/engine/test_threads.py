"""Passes of little work run on one thread, and leave torch's own number as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rhymerl.engine.forward import threads_for


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("operations", "threads"), [(1e6, 1), (1e11, 2)])
def test_only_small_passes_run_on_one_thread(operations, threads):
    with threads_for(operations):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2


def test_an_error_within_leaves_the_number_as_it_was():
    with pytest.raises(KeyError), threads_for(1.0):
        raise KeyError
    assert torch.get_num_threads() == 2
