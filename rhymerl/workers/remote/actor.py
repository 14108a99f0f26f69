"""The actor that a worker is in a Ray cluster."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Mapping

import torch

from rhymerl.history import HistoryStore
from rhymerl.models.copies import policy_of
from rhymerl.models.policy import Policy
from rhymerl.version import __version__
from rhymerl.workers.messages import Events, HostMessage
from rhymerl.workers.remote.host import EngineLoader, WorkerHost


def own_device() -> str:
    """Return the actor's own device."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def policy_here(files: Mapping[str, str], *, dtype: torch.dtype, attention: str, in_host: bool) -> Policy:
    """Return a policy of this architecture for an engine on the actor's own device; see `policy_of`."""
    return policy_of(files, dtype=dtype, attention=attention, device=own_device(), in_host=in_host)


class RayWorker:
    """The actor: messages come in one thread, questions in another, and the engine works in a third.

    `load` is a pickled EngineLoader.
    """

    def __init__(self, load: bytes, history_tokens: int | None, lockstep: bool) -> None:
        made: EngineLoader = pickle.loads(load)
        self.host = WorkerHost(made, history=HistoryStore(max_tokens=history_tokens), budget=made.budget)
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
