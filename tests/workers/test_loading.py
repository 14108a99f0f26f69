"""Where the policy of an engine apart from the ranks lies."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.drafters import NoDrafter
from rhymerl.testing import tiny_policy
from rhymerl.workers.remote.actor import HostRecipe


@pytest.mark.parametrize(("engine", "where"), [(SGLangBackend(), "cpu"), (EmbeddedBackend(), "meta")])
def test_one_that_copies_its_weights_leaves_the_policy_in_the_hosts_memory(
    engine: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's device stays what the actor has; "meta" stands for a GPU here."""
    policy = tiny_policy(dtype="float32")
    recipe = HostRecipe(
        files=policy.files(),
        dtype=torch.float32,
        attention="sdpa",
        engine=engine,
        drafter=NoDrafter(),
        budget=None,
        autocast=nullcontext,
        history={},
    )
    monkeypatch.setattr(HostRecipe, "device", "meta")
    made = pickle.loads(pickle.dumps(recipe)).host()._load.make_policy()
    assert made.model.device == torch.device(where)
    assert made.device == torch.device("meta")
