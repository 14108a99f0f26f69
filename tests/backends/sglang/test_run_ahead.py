"""Prefetched tokens, on their way into SGLang's process and as drafts there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rhymerl.backends.remote.drafter_feed import Counters
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.backends.sglang.plugin.drafting import EngineDrafting
from rhymerl.budgets import FixedBudget
from rhymerl.drafters import NGramDrafter, NoDrafter, RunAheadDrafter
from rhymerl.testing import make_requests
from tests.backends.sglang.batches import fake, run
from tests.backends.sglang.fake_engine import answer_of

N = 5
REQUESTS = make_requests(12, max_tokens=24)
ANSWERS = {each.id: answer_of(each) for each in REQUESTS}


def needed(length: int, right: int) -> int:
    """Return the passes after the prefill, which draws the first token, when `right` tokens of the answer are known."""
    done, passes = 1, 0
    while done < length:
        done += 1 + (min(N - 1, right - done, length - done - 1) if done < right else 0)
        passes += 1
    return passes


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("right", [0, 1, 7, 99])
def test_they_are_drafts_as_far_as_they_are_right(right, overlap, tmp_path):
    """While passes overlap, one more is prepared for whoever has ended; it is drafted for no more."""
    for request in REQUESTS:
        answer = ANSWERS[request.id]
        ahead = np.array([*answer[:right], *(token + 1 for token in answer[right:])], np.int32) % 19
        counters = Counters(tmp_path / "counters", new=True)
        drafting = EngineDrafting(RunAheadDrafter(NoDrafter()), FixedBudget(N - 1), vocabulary=19, counters=counters)
        asked = fake(replace(request, prefetched=ahead), answer)
        run(drafting, [asked], overlap=overlap)
        assert asked.output_ids[: len(answer)] == answer
        most = needed(len(answer), min(right, len(answer)))
        assert counters.since()["row_passes"] in (most, most + overlap)
        assert drafting.protocol.drafter._prefetched == {}


def test_beside_requests_without_them():
    requests = [replace(each, prefetched=np.array(ANSWERS[each.id], np.int32)) for each in REQUESTS[::2]] + REQUESTS[
        1::2
    ]
    batch = [fake(each, ANSWERS[each.id]) for each in requests]
    run(EngineDrafting(RunAheadDrafter(NGramDrafter()), FixedBudget(N - 1), vocabulary=19), batch)
    for request, asked in zip(requests, batch, strict=True):
        assert asked.output_ids[: len(ANSWERS[request.id])] == ANSWERS[request.id]


def test_an_engine_that_drafts_nothing_else_verifies_them():
    assert SGLangBackend().num_tokens(NoDrafter()) == 1
    assert SGLangBackend(nodes=4).num_tokens(RunAheadDrafter(NoDrafter())) == 5
