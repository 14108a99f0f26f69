"""A policy that the fake engine computes, and the engine."""

from __future__ import annotations

import pytest
import torch

from rhymerl.testing import tiny_policy
from tests.backends.sglang.fake_engine import FakeEngine


def make_flat_policy():
    """All of its distributions are uniform."""
    policy = tiny_policy(dtype="float32", hidden_size=8, num_layers=1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.zero_()
    return policy


@pytest.fixture(scope="session")
def flat_policy():
    return make_flat_policy()


@pytest.fixture
def engine():
    with FakeEngine() as engine:
        yield engine
