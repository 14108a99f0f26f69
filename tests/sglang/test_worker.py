"""What the worker reads of SGLang's batches, where a CPU never overlaps passes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("cpu_engine")]


def batch(*requests, n=4):
    """Each request: its prompt, its output so far, how many tokens have keys and values, and what its last pass drew."""
    drawn = torch.zeros(len(requests), n, dtype=torch.int32)
    for line, (*_, tokens) in enumerate(requests):
        drawn[line, : len(tokens)] = torch.tensor(tokens)
    return SimpleNamespace(
        reqs=[SimpleNamespace(origin_input_ids=prompt, output_ids=output) for prompt, output, *_ in requests],
        seq_lens_cpu=torch.tensor([cached for _, _, cached, _ in requests]),
        spec_info=SimpleNamespace(accept_tokens=drawn.flatten()),
    )


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([([1, 2, 3], [4], 3, [4])], [()]),  # after its prompt, and the result has been looked at
        ([([1, 2, 3], [], 3, [4])], [[4]]),  # not yet
        ([([1, 2, 3], [4], 6, [5, 6, 7])], [[5, 6, 7]]),  # a pass drew three tokens
        ([([1, 2, 3], [4, 5, 6, 7], 6, [5, 6, 7])], [()]),  # a prompt was computed in between, so they are known
        ([([1, 2, 3], [4, 5, 6, 7], 6, [5, 6, 7]), ([8], [], 1, [9])], [[], [9]]),  # both in one batch
    ],
)
def test_what_is_drawn_but_not_known(requests, expected):
    from rhymerl.backends.sglang.worker import HistoryWorker

    worker = HistoryWorker.__new__(HistoryWorker)
    assert [list(tokens) for tokens in worker._ahead(batch(*requests))] == [list(tokens) for tokens in expected]
