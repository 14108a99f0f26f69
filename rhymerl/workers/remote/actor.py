"""The actor that a worker is in a Ray cluster."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rhymerl.backends.base import RolloutBackend
from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.history import HistoryStore
from rhymerl.models.copies import policy_of
from rhymerl.types import Autocast
from rhymerl.version import __version__
from rhymerl.workers.messages import Events, HostMessage
from rhymerl.workers.remote.host import EngineLoader, WorkerHost


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecipe:
    """All that an actor needs to make its host."""

    files: Mapping[str, str]  # the policy's, without weights
    dtype: torch.dtype
    attention: str
    engine: RolloutBackend
    drafter: Drafter
    budget: Budget | None
    autocast: Autocast
    history: Mapping[str, Any]  # arguments of the store

    @property
    def device(self) -> str:
        """Return the actor's own device."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    def host(self) -> WorkerHost:
        load = EngineLoader(
            make_policy=partial(
                policy_of,
                self.files,
                dtype=self.dtype,
                attention=self.attention,
                device=self.device,
                in_host=self.engine.copies_weights,
            ),
            engine=self.engine,
            drafter=self.drafter,
            budget=self.budget,
            autocast=self.autocast,
        )
        return WorkerHost(load, history=HistoryStore(**self.history), budget=self.budget)


class RayWorker:
    """The actor: messages come in one thread, questions in another, and the engine works in a third."""

    def __init__(self, recipe: bytes, lockstep: bool) -> None:
        made: HostRecipe = pickle.loads(recipe)
        self.host = made.host()
        if not lockstep:
            threading.Thread(target=self.host.run, daemon=True).start()

    def home(self) -> tuple[str, str]:
        """Return its machine's name and rhymerl's version there."""
        return socket.gethostname(), __version__

    def post(self, message: HostMessage) -> None:
        self.host.post(message)

    def poll(self, wait_s: float) -> Events:
        return self.host.poll(wait_s)

    def step(self, ticks: int, only_evaluates: bool) -> Events:
        return self.host.step(ticks, only_evaluates=only_evaluates)
