"""Episodes on SGLang: the same tokens over three turns as on the embedded engine, with drafts and without."""

from __future__ import annotations

import numpy as np
import pytest

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.environments.episodes import Episodes
from rhymerl.environments.pool import EnvironmentPool
from rhymerl.history import HistoryStore
from rhymerl.testing import make_requests, tiny_policy
from rhymerl.types import Completion, RolloutRequest
from rhymerl.workers.host import Host
from tests.environments.test_episodes import answers
from tests.environments.worlds import Counts
from tests.sglang.engines import Answers, equal, largest_difference, remember, sglang, started

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("cpu_engine")]


class Codes:
    """Encodes digits as tokens that the tiny vocabulary has."""

    def encode(self, content: str, **_: object):
        return content, np.array([4 + ord(each) % 10 for each in content], np.int32)


def played(backend: RolloutBackend, requests: list[RolloutRequest]) -> Answers:
    pool = EnvironmentPool(Counts(), num_processes=1)
    made = Episodes(pool, Codes(), decode=lambda ids: "".join(map(str, ids)), context_tokens=256)
    try:
        found = answers(Host(backend, version=0, episodes=made), requests)
    finally:
        made.close()
    return {each.id: Completion(request=each, output=found[each.id]) for each in requests}


def test_three_turns_have_the_embedded_engines_tokens():
    policy = tiny_policy(dtype="float32")
    requests = make_requests(16, group_size=4, max_tokens=48, stop_token_ids=(2, 3, 5, 7))
    with EmbeddedBackend() as backend:
        ours = played(started(backend, policy), requests)
    assert sum(len(each.output.turns) == 3 for each in ours.values()) > len(ours) / 2
    history = HistoryStore()
    remember(history, ours)
    with sglang() as backend:
        drafting = started(backend, policy, HistoryTreeDrafter())
        first = played(drafting, requests)
        drafting.metrics()
        drafting.follow(history)
        second = played(drafting, requests)
        metrics = drafting.metrics()
    shares = {"first epoch": equal(first, ours), "history": equal(second, ours)}
    print(shares, metrics)
    assert min(shares.values()) >= 0.98
    assert largest_difference(second, ours) < 1e-4
    assert metrics["spec/draft_hit_rate"] > 0.9
