"""The embedded backend: our own engine in the trainer's process, on the policy's own weights."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rhymerl.backends.base import RolloutBackend
from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.engine.engine import Engine, num_rows
from rhymerl.engine.support import prove_engine, refuse_impossible, refuse_unsupported
from rhymerl.engine.totals import EngineTotals
from rhymerl.errors import BackendError, ConfigError, at_least, check_ranges
from rhymerl.history import NO_VERSION, HistoryStore
from rhymerl.memory.base import EngineShape
from rhymerl.memory.outline import ModelShape, model_shape
from rhymerl.memory.parts import kv_tokens_beside
from rhymerl.models.copies import copy_weights, twin_of
from rhymerl.models.logits import num_embeddings
from rhymerl.models.policy import Policy
from rhymerl.models.sharding import GatheredTensors
from rhymerl.types import Autocast, Completion, Ratio, RolloutRequest, Sample

_KV_TOKENS = 65_536


@dataclass(kw_only=True, eq=False)
class EmbeddedBackend(RolloutBackend):
    """Continuous batching without a server or a thread: `collect` drives the engine.

    `max_running` is the most running requests, `kv_tokens` the most tokens with keys and values in all layers,
    `max_pass_tokens` the most tokens of one forward pass. `kv_tokens` null is 65 536 on a CPU; on a GPU it is what
    running requests need of the memory beside the update. With `check_drafts` a malformed draft is an error, not only
    counted. The engine computes with the policy's own weights. Under trainer.strategy=fsdp2, where weights are sharded,
    it needs a `whole_copy`, which takes a whole model's memory.
    """

    draws_exactly = True
    keeps_sets = True
    says_routes = True
    counts_passes = True

    max_running: int = at_least(1, 64)
    kv_tokens: int | None = at_least(1, None)
    max_pass_tokens: int = at_least(1, 8_192)
    check_drafts: bool = False
    whole_copy: bool = False

    def __post_init__(self) -> None:
        check_ranges(self)
        self.complaints: set[type[Drafter]] = set()  # whose malformed drafts have been told about
        self._copy: Policy | None = None  # where it is asked for
        self._engine: Engine | None = None
        self._reported = EngineTotals()
        self._followed = NO_VERSION  # version of the history that the drafter knows

    def clock(self) -> float:
        """Return the seconds by which passes are timed; called in the engine's thread."""
        return time.perf_counter()

    def check(self, longest_tokens: int) -> None:
        if self.kv_tokens is not None and longest_tokens > self.kv_tokens:
            raise ConfigError(
                f"backend.kv_tokens={self.kv_tokens}: the longest prompt and its answer need {longest_tokens}; "
                f"expected at least that"
            )
        if self._engine is not None:
            refuse_unsupported(self._engine.model, longest_tokens)
        super().check(longest_tokens)

    def memory(self, model: ModelShape, drafter: Drafter, budget: Budget | None) -> EngineShape:
        own = model.parameters * model.itemsize if self._owns_model else 0
        return EngineShape(
            weights=own + _bytes_of_casts(model),
            kv_of_token=2 * model.layers_with_keys * model.kv_heads * model.head_size * model.compute_itemsize,
            row_states=(num_rows(self.max_running) + 1) * model.state_bytes,
            dynamic=0,
            longest_tokens=self.kv_tokens or model.longest_tokens,  # and what is left
        )

    def start(
        self, policy: Policy, drafter: Drafter, *, budget: Budget | None = None, autocast: Autocast = nullcontext
    ) -> None:
        if self.whole_copy and not self.owns_policy:  # else it has a copy already
            named, policy = policy.named_weights(), twin_of(policy)
            self._copy = policy
            self._refresh(named)
        refuse_unsupported(policy.model, self.longest_tokens or policy.context_tokens)
        prove_engine(policy.model)
        with autocast():
            kv_tokens = self.kv_tokens or self._kv_tokens(policy)
        self._engine = Engine(
            policy.model,
            drafter=drafter,
            budget=budget,
            max_running=self.max_running,
            kv_tokens=kv_tokens,
            max_pass_tokens=self.max_pass_tokens,
            check_drafts=self.check_drafts,
            complaints=self.complaints,
            autocast=autocast,
            now=self.clock,
            owns_model=self._owns_model,
        )
        self._reported = EngineTotals()
        self._followed = NO_VERSION

    def _kv_tokens(self, policy: Policy) -> int:
        """Return how many tokens' keys and values fit. Raises ConfigError if the longest sequence does not."""
        device, longest = policy.device, self.longest_tokens or policy.context_tokens
        if device.type != "cuda":
            return max(_KV_TOKENS, longest)
        is_cast = torch.is_autocast_enabled("cuda")
        itemsize = torch.get_autocast_dtype("cuda").itemsize if is_cast else policy.model.dtype.itemsize
        shape = model_shape(policy.model, longest, compute_itemsize=itemsize)
        engine = self.memory(shape, NoDrafter(), None)
        torch.cuda.empty_cache()  # what an engine before has left
        free, _ = torch.cuda.mem_get_info(device)
        room = kv_tokens_beside(self.setup, engine, free - _bytes_of_casts(shape))
        if room < longest:
            raise ConfigError(
                f"backend=embedded: beside the update the GPU has room for keys and values of {max(room, 0)} tokens, and the longest prompt "
                f"and its answer need {longest}; expected fewer update.micro_batch_tokens, update.activation_checkpointing=true, "
                "or backend.kv_tokens, which sets aside this estimate"
            )
        return min(room, 2 * self.max_running * longest)

    @property
    def _owns_model(self) -> bool:
        return self.owns_policy or self.whole_copy

    @property
    def engine(self) -> Engine:
        """Return the running engine. Raises BackendError before `start` and after `close`."""
        if self._engine is None:
            raise BackendError("the embedded backend has not been started")
        return self._engine

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        engine = self.engine
        longest, vocabulary = self.longest_tokens or engine.rows.context, num_embeddings(engine.model)
        for request in requests:
            refuse_impossible(request, longest, vocabulary=vocabulary)
        engine.submit(requests)

    def collect(self, timeout_s: float | None = None, *, max_passes: int | None = None) -> list[Completion]:
        deadline = None if timeout_s is None else self.engine.now() + timeout_s
        return self.engine.run(deadline, max_passes=max_passes)

    def withdraw(self, ids: Iterable[str] | None = None) -> list[Completion]:
        return self.engine.withdraw(ids)

    def ready(self) -> AbstractContextManager[None]:
        return self.engine.forward.ready()

    def forget(self, ids: Iterable[str]) -> None:
        self.engine.forget(ids)

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Drop old keys and values.

        The engine reads the policy itself, or a copy, which takes the tensors: a collective if weights are sharded over
        ranks.
        """
        self.engine.new_weights(policy_version)
        if self._copy is not None:
            self._refresh(named_tensors)

    def _refresh(self, named: Iterable[tuple[str, Tensor]]) -> None:
        assert self._copy is not None
        copy_weights(self._copy.model, named.everywhere() if isinstance(named, GatheredTensors) else named)

    def progress(self) -> Mapping[str, int]:
        return self.engine.progress()

    def outputs(self) -> list[Completion]:
        return self.engine.outputs()

    def learn(self, samples: Sequence[Sample]) -> None:
        self.engine.protocol.learn(samples)

    def follow(self, history: HistoryStore) -> None:
        delta = history.deltas(self._followed)
        self._followed = delta.version
        self.engine.protocol.follow(delta)

    def metrics(self) -> Mapping[str, float]:
        totals = dataclasses.replace(self.engine.totals)
        new, self._reported = totals.minus(self._reported), totals
        meter = self.engine.speedup
        worth = meter.report(self.engine.progress()) if meter is not None else {}
        by_depth = zip(new.accepted_to_depth.tolist(), new.drafts_to_depth.tolist(), strict=True)
        return {
            "rollout/passes": new.passes,
            "rollout/preemptions": new.preemptions,
            "rollout/tail_frac": Ratio(new.tail_s, new.busy_s),
            "rollout/spec_accept_length": Ratio(new.emitted_tokens, new.request_passes),
            "rollout/spec_accept_rate": Ratio(new.accepted_nodes, new.drafted_nodes),
            **{f"spec/accept_rate_pos_{depth}": Ratio(*counts) for depth, counts in enumerate(by_depth, start=1)},
            "spec/draft_hit_rate": Ratio(new.hits, new.asks),
            "spec/accepted_own_frac": Ratio(new.accepted_own, new.accepted_nodes),
            "spec/accepted_sibling_frac": Ratio(new.accepted_sibling, new.accepted_nodes),
            "spec/accepted_run_ahead_frac": Ratio(new.accepted_run_ahead, new.accepted_nodes),
            "spec/run_ahead_accept_rate": Ratio(new.accepted_run_ahead, new.drafted_run_ahead),
            "spec/accepted_other_frac": Ratio(new.accepted_other, new.accepted_nodes),
            "spec/accepted_history_frac": Ratio(new.accepted_history, new.accepted_nodes),
            "history/hit_epoch_age": Ratio(new.accepted_age_epochs, new.accepted_history),
            "spec/draft_time_frac": Ratio(new.draft_s, new.busy_s),
            "spec/bad_drafts": new.bad_drafts,
            **worth,
            **self.engine.protocol.budget.metrics(),
        }

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._copy = None


def _bytes_of_casts(model: ModelShape) -> int:
    """Return the bytes of weights in the dtype of passes, which stay in the update: CUDA graphs read them."""
    return model.parameters * model.compute_itemsize if model.compute_itemsize != model.itemsize else 0
