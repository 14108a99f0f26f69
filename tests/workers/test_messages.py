"""What of an answer is told bit by bit is the whole of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rhymerl.types import Output
from rhymerl.workers.messages import OutputDelta


def output(length: int, *, has_sources: bool) -> Output:
    ids = np.arange(length, dtype=np.int32)
    sources = (ids % 5).astype(np.int8) if has_sources else None
    return Output(token_ids=ids, logprobs=-ids / 3, policy_versions=ids // 4, num_passes=length, sources=sources)


@pytest.mark.parametrize("has_sources", [True, False])
def test_tails_join_to_the_whole(has_sources):
    known = Output.of()
    for start, end in ((0, 3), (3, 3), (3, 10)):
        whole = output(end, has_sources=has_sources)
        known = OutputDelta(id="a", start=start, output=whole[start:]).applied_to(known)
    for name in ("token_ids", "logprobs", "policy_versions"):
        assert np.array_equal(getattr(known, name), getattr(whole, name))
    assert known.num_passes == 10
    assert known.sources is None if not has_sources else known.sources.tolist() == whole.sources.tolist()


def test_what_was_sampled_later_is_added():
    first, then = output(3, has_sources=True), replace(output(2, has_sources=True), finish_reason="stop", num_drafted=7)
    whole = first + then
    assert whole.token_ids.tolist() == [0, 1, 2, 0, 1]
    assert whole.sources.tolist() == [0, 1, 2, 0, 1]
    assert (whole.finish_reason, whole.num_passes, whole.num_drafted) == ("stop", 5, 7)
    assert (Output.of() + then).sources is None, "nobody knows where those before came from"
    assert (whole[:3].token_ids.tolist(), whole[:3].num_passes) == ([0, 1, 2], 5)
