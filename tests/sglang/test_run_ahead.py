"""Prefetched tokens, in SGLang's own process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rhymerl.drafters import NoDrafter, RunAheadDrafter
from rhymerl.testing import make_requests, tiny_policy
from tests.sglang.engines import answered, embedded, equal, sglang, started

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("cpu_engine")]


def test_they_save_passes_and_change_no_answer():
    """Seven nodes a pass are all right, or none from the tenth token on, or there are no prefetched tokens."""
    policy = tiny_policy(dtype="float32", context=512)
    requests = make_requests(12, group_size=4, max_tokens=48, stop_token_ids=())
    ours = embedded(policy, requests)
    lengths = {}
    with sglang() as backend:
        started(backend, policy, RunAheadDrafter(NoDrafter()))
        for name, num_right in (("right", 48), ("wrong from the tenth", 10), ("none", 0)):
            asked = requests
            if num_right:
                tokens = {n: each.token_ids for n, each in ours.items()}
                wrong = np.arange(48) >= num_right
                asked = [replace(each, prefetched=(tokens[each.id] + wrong).astype(np.int32) % 19) for each in requests]
            answers = answered(backend, asked)
            lengths[name] = backend.metrics()["rollout/spec_accept_length"]
            assert equal(answers, ours) >= 0.95
    print(lengths)
    assert lengths["right"] > 5
    assert 1.1 < lengths["wrong from the tenth"] < 2
    assert lengths["none"] == pytest.approx(1.0)
