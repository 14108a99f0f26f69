"""The settings that the backend gives to a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rhymerl.backends.remote.node import NodePosition
from rhymerl.backends.remote.weight_file import SharedWeightFile
from rhymerl.backends.sglang.nodes import AllowedNodes
from rhymerl.budgets.base import Budget
from rhymerl.folders import open_folder
from rhymerl.memory.base import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """See SGLangBackend; `n` tokens of a request in a pass at most, its last one among them."""

    n: int
    allowed: AllowedNodes  # what a server that runs already may verify
    budget: Budget | None  # None is goodput's
    max_running: int
    longest_tokens: int | None  # of a prompt and its answer; None = the model's context
    dtype: str | None
    tensor_parallel: int
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    weights: Literal["auto", "tensor", "disk", "distributed"]
    restarts: int
    release_memory: bool
    folder: str | None  # where the session makes its own
    start_timeout_s: float
    silence_timeout_s: float
    piece_s: float | None
    setup: Setup | None  # of the trainer on the same GPU, with this engine; None: it trains nothing
    node: NodePosition
    weight_file: SharedWeightFile | None = None  # that other sessions read too

    def opened_folder(self) -> Path | None:
        """Make and return the session's own folder in `folder`, of which every rank has a part."""
        if self.folder is None:
            return None
        part = f"rank{self.node.rank}" if self.node.num_ranks > 1 else ""
        return open_folder(Path(self.folder, part), setting="backend.folder").resolve()
