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
from rhymerl.workers.remote.host import EngineLoader, WorkerHost


def own_device() -> str:
    """Return the actor's own device."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def policy_here(files: Mapping[str, str], *, dtype: torch.dtype, attention: str, in_host: bool) -> Policy:
    """Return a policy of this architecture for an engine on the actor's own device; see `policy_of`."""
    return policy_of(files, dtype=dtype, attention=attention, device=own_device(), in_host=in_host)


class RayWorker(WorkerHost):
    """The host as an actor: messages come in one thread, questions in another, and the engine works in a third.

    `load` is a pickled EngineLoader.
    """

    def __init__(self, load: bytes, history_tokens: int | None, lockstep: bool) -> None:
        made: EngineLoader = pickle.loads(load)
        super().__init__(made, history=HistoryStore(max_tokens=history_tokens), budget=made.budget)
        if not lockstep:
            threading.Thread(target=self.run, daemon=True).start()

    def home(self) -> tuple[str, str]:
        """Return its machine's name and rhymerl's version there."""
        return socket.gethostname(), __version__
