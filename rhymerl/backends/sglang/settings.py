"""The settings of the SGLang backend, and what follows from them before an engine is there."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rhymerl.backends.base import HISTORY_TOKENS, RolloutBackend
from rhymerl.backends.remote.client import Client
from rhymerl.backends.remote.node import NodePosition
from rhymerl.backends.sglang.arguments import check, check_for_ranks, engine_dtype
from rhymerl.backends.sglang.memory import engine_shape
from rhymerl.backends.sglang.nodes import LARGEST, AllowedNodes, allowed_nodes, best_n, num_sizes
from rhymerl.budgets.base import Budget
from rhymerl.budgets.goodput import GoodputBudget
from rhymerl.config import construct
from rhymerl.costs import CostCurve
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.errors import ConfigError, at_least, check_ranges, require, require_package
from rhymerl.folders import open_folder
from rhymerl.memory.base import EngineShape
from rhymerl.memory.outline import ModelShape
from rhymerl.models.policy import DTYPES, Policy

_USUAL_NODES = 7  # without a cost curve
_START_S = 600.0


def require_sglang(*, memory_saver: bool) -> None:
    """Raise ConfigError when SGLang is not installed, or not the package with which it gives memory back."""
    require_package("sglang", "backend=sglang")
    if memory_saver and importlib.util.find_spec("torch_memory_saver") is None:
        raise ConfigError(
            "backend.release_memory=true: expected torch_memory_saver to be installed, which comes with sglang"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class SGLangSettings(RolloutBackend):
    """See SGLangBackend."""

    copies_weights = True

    nodes: int | None = at_least(0, None)
    costs: str | None = None
    expected_accept_rate: float = 0.7
    max_running: int = at_least(1, 64)
    dtype: Literal["float32", "bfloat16"] | None = None
    tensor_parallel: int = at_least(1, 1)
    arguments: Mapping[str, Any] | None = None
    environment: Mapping[str, str] | None = None
    weights: Literal["auto", "tensor", "disk", "distributed"] = "auto"
    url: str | Sequence[str] | None = None
    api_key: str | None = None
    history_tokens: int | None = at_least(1, HISTORY_TOKENS)
    restarts: int = at_least(0, 0)
    release_memory: bool = False
    folder: str | None = None
    start_timeout_s: float = at_least(1, _START_S)
    silence_timeout_s: float = at_least(1, 300.0)
    piece_s: float | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        is_piece = self.piece_s is None or 0 < self.piece_s < math.inf
        require(is_piece, "piece_s", self.piece_s, "a finite number above 0, or null for whole answers")
        is_rate = 0 <= self.expected_accept_rate < 1
        require(is_rate, "expected_accept_rate", self.expected_accept_rate, "at least 0 and below 1")
        check(self.arguments or {})
        if self.url is not None:
            self._refuse_what_starts_a_server()
        elif self.api_key is not None:
            raise ValueError("api_key: is for servers that run already, at `url`; one that the run starts needs none")
        elif self.history_tokens != HISTORY_TOKENS:
            raise ValueError(
                f"history_tokens={self.history_tokens}: is for servers that run already, at `url`; history.max_tokens is for all others"
            )
        self.has_servers, self.addresses = self.url is not None, _addresses(self.url, self.api_key)
        self._cost = CostCurve.read(self.costs) if self.costs is not None else None

    def _refuse_what_starts_a_server(self) -> None:
        given = {
            "arguments": self.arguments,
            "environment": self.environment,
            "restarts": self.restarts,
            "costs": self.costs,
            "start_timeout_s": self.start_timeout_s != _START_S,
        }
        for name in filter(given.__getitem__, given):
            raise ValueError(
                f"{name}={getattr(self, name)!r}: is for a server that the run starts; url={self.url!r} runs already"
            )

    def check(self, longest_tokens: int) -> None:
        """Raise ConfigError where SGLang is not installed, unless servers run already."""
        if self.url is None:
            require_sglang(memory_saver=False)
        super().check(longest_tokens)

    def check_drafting(self, drafter: Drafter, budget: Budget | None) -> None:
        """Raise ConfigError for a budget that does not verify equally many nodes of all requests in a pass."""
        self.allowed_nodes(drafter, budget)

    def check_place(self, policy: Policy, node: NodePosition) -> None:
        """Raise ConfigError for an engine that cannot be the policy's, or that of all ranks on the node."""
        if node.num_ranks > 1:
            if self.tensor_parallel > 1 and node.num_here > 1 and not self.addresses:
                raise ConfigError(
                    f"backend.tensor_parallel={self.tensor_parallel}: expected 1 with {node.num_here} ranks on a node, of which each has "
                    "an engine on its own GPU"
                )
            construct(check_for_ranks, {"arguments": self.arguments or {}}, key="backend")
        if self.weights == "distributed" and self.url is None and policy.device.type == "cuda":
            raise ConfigError(
                "backend.weights=distributed: an engine that the run starts shares the trainer's GPU, and NCCL refuses two ranks on one; "
                "expected tensor, disk or auto"
            )

    def memory(self, model: ModelShape, drafter: Drafter, budget: Budget | None) -> EngineShape:
        dtype = DTYPES[engine_dtype(self.dtype, "float32", on_cpu=False)]
        n = self.num_tokens(drafter, budget)
        return engine_shape(
            model,
            itemsize=dtype.itemsize,
            gpus=self.tensor_parallel,
            rows=self.max_running * n,
            sizes=num_sizes(n, budget),
        )

    def num_tokens(self, drafter: Drafter, budget: Budget | None = None) -> int:
        """Return the most tokens of a request in a pass, draft included. Raises ConfigError as `check_drafting`."""
        allowed = self.allowed_nodes(drafter, budget)
        if isinstance(drafter, NoDrafter):
            return 1
        if allowed.exact is not None:
            return 1 + allowed.exact
        if self.nodes is not None:
            return 1 + self.nodes
        most = LARGEST - 1 if allowed.most is None else allowed.most
        if budget is not None and not isinstance(budget, GoodputBudget):
            return 1 + most  # its own rule says how many are used
        if self._cost is not None:
            return best_n(self._cost, 1, self.expected_accept_rate, largest=min(LARGEST, 1 + most))
        return 1 + min(_USUAL_NODES, most)

    def allowed_nodes(self, drafter: Drafter, budget: Budget | None) -> AllowedNodes:
        """Return the numbers of nodes that a server may verify. Raises ConfigError as `check_drafting`."""
        return allowed_nodes(drafter, budget, nodes=self.nodes)

    def opened_folder(self, node: NodePosition) -> Path | None:
        """Make and return the part of `folder` that is this rank's."""
        if self.folder is None:
            return None
        part = f"rank{node.rank}" if node.num_ranks > 1 else ""
        return open_folder(Path(self.folder, part), setting="backend.folder").resolve()


def _addresses(url: str | Sequence[str] | None, api_key: str | None) -> list[Client]:
    if url is None:
        return []
    if not url:
        raise ValueError(f"url={url!r}: expected an address, several, or null for a server that the run starts")
    return [Client.at(each, api_key=api_key) for each in ([url] if isinstance(url, str) else url)]
