"""Setups of small models, whose memory and traffic are asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel

from rhymerl.algos import GRPO
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.drafters import NoDrafter
from rhymerl.memory.base import Layout, Setup
from rhymerl.models.critic import Critic
from rhymerl.training.memory import make_setup
from rhymerl.training.settings import UpdateSettings


def setup_for(model: PreTrainedModel, critic: Critic | None = None, **more: Any) -> Setup:
    """One rank, one backward a step, no reference, unless something else is said."""
    parts: dict[str, Any] = {
        "reference": None,
        "algo": GRPO(),
        "update": UpdateSettings(),
        "backend": EmbeddedBackend(kv_tokens=1024),
        "drafter": NoDrafter(),
        "budget": None,
    }
    settings: dict[str, Any] = {
        "layout": Layout(),
        "precision": "32-true",
        "longest": 32,
        "step_tokens": 512,
        "chunk_tokens": 64,
        "offloads_optimizer": False,
    }
    assert more.keys() <= {*parts, *settings}
    run: Any = SimpleNamespace(model=model, critic=critic, **{name: more.get(name, parts[name]) for name in parts})
    return make_setup(run, **{name: more.get(name, settings[name]) for name in settings})
