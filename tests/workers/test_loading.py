"""Where the policy of an engine apart from the ranks lies."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.drafters import NoDrafter
from rhymerl.testing import tiny_policy
from rhymerl.workers.remote.ray import RayBackend


@pytest.mark.parametrize(("engine", "where"), [(SGLangBackend(), "cpu"), (EmbeddedBackend(), "meta")])
def test_one_that_copies_its_weights_leaves_the_policy_in_the_hosts_memory(
    engine: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's device stays what the actor has; "meta" stands for a GPU here."""
    backend = RayBackend(engine=engine)
    backend.start(tiny_policy(dtype="float32"), NoDrafter())
    monkeypatch.setattr("rhymerl.workers.remote.actor.own_device", lambda: "meta")
    made = pickle.loads(pickle.dumps(backend._load)).make_policy()
    assert made.model.device == torch.device(where)
    assert made.device == torch.device("meta")
