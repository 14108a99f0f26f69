"""The SGLang backend: a production engine in its own process, or one that runs already, with our drafters inside."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from rhymerl.backends.base import HISTORY_TOKENS, ServedBackend
from rhymerl.backends.remote.addresses import engines_at
from rhymerl.backends.remote.client import Client
from rhymerl.backends.remote.node import NodePosition
from rhymerl.backends.remote.weight_file import SharedWeightFile
from rhymerl.backends.sglang.arguments import check, check_for_ranks, engine_dtype
from rhymerl.backends.sglang.memory import engine_shape
from rhymerl.backends.sglang.nodes import LARGEST, AllowedNodes, allowed_nodes, best_n, num_sizes
from rhymerl.backends.sglang.own import require_sglang
from rhymerl.backends.sglang.session import Session
from rhymerl.backends.sglang.session_settings import SessionSettings
from rhymerl.budgets.base import Budget
from rhymerl.budgets.goodput import GoodputBudget
from rhymerl.config import construct
from rhymerl.costs import CostCurve
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.errors import BackendError, ConfigError, at_least, check_ranges, require
from rhymerl.history import HistoryStore
from rhymerl.memory.base import EngineShape, Setup
from rhymerl.memory.outline import ModelShape
from rhymerl.models.policy import DTYPES, Policy
from rhymerl.types import Autocast, Completion, RolloutRequest, Sample

_USUAL_NODES = 7  # without a cost curve
_START_S = 600.0


@dataclass(kw_only=True, eq=False, repr=False)
class SGLangBackend(ServedBackend):
    """Answers come from an SGLang server that starts and ends with the run, or from servers that run at `url` already.

    All requests of a pass have equally many draft nodes. With `budget=goodput` their number is chosen pass by pass,
    from 0 to `nodes`; with `budget=fixed` it is the budget's; it is never above `budget.nodes`. `nodes` null is chosen
    by `costs` (a file of `rhymerl bench costs`), for one running request whose drafts are accepted with probability
    `expected_accept_rate`; without `costs` it is 7.

    `arguments` go to the server as they are, `environment` to its process. `weights` is how new weights are sent:
    `tensor` (on the same device), `disk` (a file in `folder`, by default in shared memory if there is room),
    `distributed` (a process group with the engine's ranks), or `auto`. An engine fails when it dies, or when it is
    silent for `silence_timeout_s` and fails a health check; it is restarted up to `restarts` times. `release_memory`
    frees its memory during updates. With `piece_s` answers are requested in pieces that take about so long, so that a
    lost engine costs no more.

    `url` names one or several running servers, or routers, whose servers are then used directly; `api_key` is theirs,
    if they need one. Each server is a worker, which remembers at most `history_tokens` of past answers (null: no
    limit).
    """

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
        self._addresses = _addresses(self.url, self.api_key)
        self._cost = CostCurve.read(self.costs) if self.costs is not None else None
        self._node: NodePosition | None = None  # of a worker apart from ranks
        self._weight_file: SharedWeightFile | None = None  # with other servers
        self._session: Session | None = None
        self._longest_tokens: int | None = None
        self._setup: Setup | None = None

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
        self._longest_tokens = longest_tokens

    def check_drafting(self, drafter: Drafter, budget: Budget | None) -> None:
        """Raise ConfigError for a budget that does not verify equally many nodes of all requests in a pass."""
        self._allowed_nodes(drafter, budget)

    def share(self, setup: Setup | None) -> None:
        """Give a new engine what the update leaves of the GPU, unless `arguments` set mem_fraction_static."""
        self._setup = setup

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

    @property
    def has_servers(self) -> bool:
        return self.url is not None

    def servers(self) -> Sequence[SGLangBackend]:
        """Return a backend for each of them, whose `start` asks nothing of other ranks."""
        engines, found = engines_at(self._addresses), []
        shared = SharedWeightFile(len(engines))
        for engine in engines:
            one = copy(self)
            one._weight_file = shared
            one.url, one._addresses, one._node = engine.url, [engine], NodePosition()
            found.append(one)
        return found

    def words(self) -> str | None:
        return self.session.memory

    def start(
        self, policy: Policy, drafter: Drafter, *, budget: Budget | None = None, autocast: Autocast = nullcontext
    ) -> None:
        """Start or resume the engine; it computes in `dtype`, by default the policy's, not under `autocast`."""
        if self._session is not None and self._session.serves(policy, drafter, self._longest_tokens):
            return
        self.close()
        node = self._node or NodePosition.of_this_process()
        if node.num_ranks > 1:
            self._refuse_what_ranks_would_share(node)
        if self.weights == "distributed" and self.url is None and policy.device.type == "cuda":
            raise ConfigError(
                "backend.weights=distributed: an engine that the run starts shares the trainer's GPU, and NCCL refuses two ranks on one; "
                "expected tensor, disk or auto"
            )
        setup = self._setup
        if setup is not None:
            setup = replace(setup, engine=self.memory(setup.model, drafter, budget))
        settings = SessionSettings(
            n=self.num_tokens(drafter, budget),
            allowed=self._allowed_nodes(drafter, budget),
            budget=budget,
            max_running=self.max_running,
            longest_tokens=self._longest_tokens,
            dtype=self.dtype,
            tensor_parallel=self.tensor_parallel,
            arguments=self.arguments or {},
            environment=self.environment or {},
            weights=self.weights,
            restarts=self.restarts,
            release_memory=self.release_memory,
            folder=self.folder,
            start_timeout_s=self.start_timeout_s,
            silence_timeout_s=self.silence_timeout_s,
            piece_s=self.piece_s,
            setup=setup,
            node=node,
            weight_file=self._weight_file,
        )
        self._session = Session(settings, policy, drafter, addresses=self._addresses)

    def _refuse_what_ranks_would_share(self, node: NodePosition) -> None:
        if self.tensor_parallel > 1 and node.num_here > 1 and not self._addresses:
            raise ConfigError(
                f"backend.tensor_parallel={self.tensor_parallel}: expected 1 with {node.num_here} ranks on a node, of which each has "
                "an engine on its own GPU"
            )
        construct(check_for_ranks, {"arguments": self.arguments or {}}, key="backend")

    def num_tokens(self, drafter: Drafter, budget: Budget | None = None) -> int:
        """Return the most tokens of a request in a pass, draft included. Raises ConfigError as `check_drafting`."""
        allowed = self._allowed_nodes(drafter, budget)
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

    def _allowed_nodes(self, drafter: Drafter, budget: Budget | None) -> AllowedNodes:
        return allowed_nodes(drafter, budget, nodes=self.nodes)

    @property
    def session(self) -> Session:
        """Return the running engine. Raises BackendError before `start` and after `close`."""
        if self._session is None:
            raise BackendError("the SGLang backend has not been started")
        return self._session

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self.session.submit(requests)

    def collect(self, timeout_s: float | None = None, *, max_passes: int | None = None) -> list[Completion]:
        if max_passes is not None:
            raise ValueError(f"max_passes={max_passes}: the SGLang engine cannot be told how many passes to run")
        return self.session.collect(timeout_s)

    def withdraw(self, ids: Iterable[str] | None = None) -> list[Completion]:
        return self.session.withdraw(ids)

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Requests in flight are taken back, and sent on with their tokens when the weights are there."""
        self.session.sync_weights(named_tensors, policy_version)

    def progress(self) -> Mapping[str, int]:
        """Return how many tokens each request brought along.

        What the engine has sampled since is not known without `piece_s`: it tells when an answer ends.
        """
        return self.session.progress()

    def outputs(self) -> list[Completion]:
        return self.session.outputs()

    def learn(self, samples: Sequence[Sample]) -> None:
        self.session.learn(samples)

    def follow(self, history: HistoryStore) -> None:
        self.session.follow(history)

    def sleep(self) -> None:
        self.session.sleep()

    def metrics(self) -> Mapping[str, float]:
        return self.session.metrics()

    def release(self) -> None:
        """Expect new weights for the next stage; the engine's process stays."""
        self.session.expect_new_weights()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None


def _addresses(url: str | Sequence[str] | None, api_key: str | None) -> list[Client]:
    if url is None:
        return []
    if not url:
        raise ValueError(f"url={url!r}: expected an address, several, or null for a server that the run starts")
    return [Client.at(each, api_key=api_key) for each in ([url] if isinstance(url, str) else url)]
