"""What of an answer is told bit by bit is the whole of it."""

from __future__ import annotations

import numpy as np
import pytest

from rhymerl.backends.hosted.messages import nothing, tail_of
from rhymerl.types import Output


def output(length: int, *, has_sources: bool) -> Output:
    ids = np.arange(length, dtype=np.int32)
    sources = (ids % 5).astype(np.int8) if has_sources else None
    return Output(token_ids=ids, logprobs=-ids / 3, policy_versions=ids // 4, num_passes=length, sources=sources)


@pytest.mark.parametrize("has_sources", [True, False])
def test_tails_join_to_the_whole(has_sources):
    known = nothing()
    for start, end in ((0, 3), (3, 3), (3, 10)):
        whole = output(end, has_sources=has_sources)
        known = tail_of("a", whole, start).behind(known)
    for name in ("token_ids", "logprobs", "policy_versions"):
        assert np.array_equal(getattr(known, name), getattr(whole, name))
    assert known.num_passes == 10
    assert known.sources is None if not has_sources else known.sources.tolist() == whole.sources.tolist()
