"""The embedded engine: continuous batching and tree verification over the policy's own weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import numpy as np
from transformers import PreTrainedModel

from rhymerl.budgets.base import Budget
from rhymerl.budgets.fixed import FixedBudget
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.drafts import no_drafts
from rhymerl.engine.admission import Admission
from rhymerl.engine.drafting import Drafting
from rhymerl.engine.forward import Forward
from rhymerl.engine.kv_store import KVStore
from rhymerl.engine.layout import PassLayout, lay_out_pass
from rhymerl.engine.protocol import DraftingProtocol
from rhymerl.engine.rows import Rows
from rhymerl.engine.sampler import DeviceSampler, HostSampler, Sampler, draws_of
from rhymerl.engine.speedup import SpeedupMeter
from rhymerl.engine.support import refuse_impossible
from rhymerl.engine.totals import EngineTotals, PassRecord
from rhymerl.engine.verify import Verification, commit, verify
from rhymerl.errors import BackendError
from rhymerl.types import Autocast, Completion, FinishReason, RolloutRequest

_HAND_OVER = 8  # passes


def num_rows(max_running: int) -> int:
    """Return the rows of an engine: requests, and as many prefixes of prompts."""
    return 2 * max_running + 16


class Engine:
    """Answers requests with continuous batching: a slot frees the moment its request ends, and the next enters.

    `max_running` requests decode side by side; `kv_tokens` bounds the tokens that have keys and values (when it is full
    the youngest request is preempted and recomputed later); `max_pass_tokens` bounds one forward pass. `budget` says
    how much of what `drafter` proposes is verified. With `check_drafts` a malformed draft raises ValueError; otherwise
    it is ignored and counted (`complaints`: see DraftingProtocol). `autocast` is entered around every forward. Passes
    are timed by the clock `now`. `owns_model`: nobody else runs it while the engine has work.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        drafter: Drafter | None = None,
        budget: Budget | None = None,
        max_running: int = 64,
        kv_tokens: int = 65_536,
        max_pass_tokens: int = 8_192,
        check_drafts: bool = False,
        complaints: set[type[Drafter]] | None = None,
        autocast: Autocast = nullcontext,
        now: Callable[[], float] = time.perf_counter,
        owns_model: bool = False,
    ) -> None:
        self.now = now
        self.model = model
        self.max_running = max_running
        self.max_pass_tokens = max_pass_tokens
        self.policy_version = 0
        self._most_emitting = 0  # requests in a pass, since there was no work
        self.totals = EngineTotals()
        config = model.config.get_text_config()
        positions = int(getattr(config, "max_position_embeddings", 0) or kv_tokens)
        # Running rows and as many prefixes can never hold more than this.
        num_slots = min(kv_tokens, 2 * max_running * positions)
        self.kv = KVStore(config.num_hidden_layers, num_slots, num_rows(max_running))
        self.forward = Forward(model, self.kv, autocast=autocast, stays_ready=owns_model)
        self.rows = Rows(num_rows(max_running), min(positions, self.kv.num_slots), self.kv.pool, self.forward.routes)
        self.protocol = DraftingProtocol(
            drafter if drafter is not None else NoDrafter(),
            budget if budget is not None else FixedBudget(),
            vocabulary=config.vocab_size,
            checks=check_drafts,
            complaints=complaints,
        )
        # Without a drafter there is nothing to compare.
        self.speedup = SpeedupMeter(max_running, now=self.now) if self.protocol.max_nodes else None
        self.observers: list[Callable[[PassRecord], None]] = [self.totals.note]  # hear of each pass
        if self.speedup is not None:
            self.observers.append(self.speedup.note)
        self.drafting = Drafting(self.protocol, self.rows, self.totals, now=self.now)
        self.admission = Admission(self.rows, max_running=max_running, max_pass_tokens=max_pass_tokens)
        self._allocate()

    def close(self) -> None:
        """Close the drafter, and free keys and values."""
        self.protocol.close()
        self.kv.free()

    def _allocate(self) -> None:
        """Feed one token to the model, which knows the store's shapes.

        So a pass is laid out the same way whether or not others came before, and the first one of a resumed run gives
        the very log-probs that it gave in the whole run.
        """
        row = self.rows.enter_prefix(np.zeros(1, np.int32)).row
        nobody = np.empty(0, np.int64)
        layout = lay_out_pass(self.rows, np.array([row]), np.array([1]), nobody, no_drafts(0))
        with self.forward.ready():
            self.forward.logits(layout)
        self.forward.forget()  # of the store's shapes it knew nothing
        self.rows.cached[row] = 1
        self.rows.leave(row)

    # -- the interface of a backend -------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return whether a request is waiting or running."""
        return self.admission.has_work

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests. Raises ConfigError, queueing nothing, when one could never be answered."""
        for request in requests:
            refuse_impossible(request, self.rows.context)
        if not self.has_work:
            self.drafting.begin_rollout(self.policy_version)
            self._most_emitting = 0
        self.admission.submit(requests)
        if self.speedup is not None:
            self.speedup.submit(requests)

    def run(self, deadline: float | None = None, *, max_passes: int | None = None) -> list[Completion]:
        """Step until requests have ended, nothing is left, or its clock (`now`) has passed `deadline`.

        Completions are handed over every few passes, since entering and leaving the engine walks all modules; at once
        where one may go on behind an environment's reply. With `max_passes` they are handed over after so many and not
        before.
        """
        finished: list[Completion] = []
        passes = 0
        with self.forward.ready():
            while self.has_work and (deadline is None or self.now() < deadline):
                if passes == max_passes or (max_passes is None and finished and passes % _HAND_OVER == 0):
                    break
                new = self.step()
                finished += new
                passes += 1
                if max_passes is None and any(each.request.may_go_on for each in new):
                    break
        self._rest()
        return finished

    def _rest(self) -> None:
        """Where no request is left, not even one that may go on, free what passes need."""
        if not self.has_work and not self.admission.kept.held:
            self.forward.forget()

    def step(self) -> list[Completion]:
        """One pass over the running batch; call within `forward.ready()`."""
        started = self.now()
        layout = self._schedule()
        sampler = self._run_pass(layout)
        if not self.forward.is_on_host:
            self.drafting.catch_up()
        verified = self._commit(layout, sampler)
        self.drafting.tell(layout, verified, seconds=self.now() - started)
        finished = self._finish(layout, verified)
        self._report(layout, verified, seconds=self.now() - started)
        return finished

    def progress(self) -> dict[str, int]:
        """Return the response tokens so far of all requests by id, the running ones first, oldest first."""
        return self.admission.progress()

    def outputs(self) -> list[Completion]:
        """Return what there is of the requests that are running, oldest first."""
        return [self.rows.completion(row, "withdrawn") for row in self.admission.running]

    def withdraw(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """Take back requests, those that have run first, with what has been sampled of them; None = all."""
        started, fresh = self.admission.withdraw(ids)
        for completion in started:
            self.protocol.finish(completion)
        if self.speedup is not None:
            self.speedup.leave([*started, *fresh])
        return [*started, *fresh]

    def forget(self, ids: Iterable[str]) -> None:
        """Requests whose turn is over do not go on: what has been kept for them is free."""
        for name in ids:
            self.admission.kept.forget(name)
        self._rest()

    def new_weights(self, policy_version: int) -> None:
        """The policy has changed: forget all keys and values; running requests go on from their tokens."""
        self.admission.preempt_all()
        self.forward.forget()
        self.policy_version = policy_version
        self.drafting.begin_rollout(policy_version)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every KV slot is free or owned by exactly one live row."""
        self.admission.check_integrity()

    # -- one step ----------------------------------------------------------------------------------------------

    def _schedule(self) -> PassLayout:
        """Admit requests, choose what each row feeds, and ask for drafts."""
        self.drafting.start(self.admission.admit())
        rows, free = self.rows, self.kv.pool
        row, chain, emits, num_tokens = self.admission.feed()
        spare = min(free.num_free, self.max_pass_tokens) - num_tokens
        drafts = self.drafting.ask(row[emits], spare=spare, num_waiting=self.admission.num_waiting)
        forward, in_place = self.forward, self.kv.is_readable_in_place
        return lay_out_pass(rows, row, chain, emits, drafts, compiled=in_place, tile_tokens=forward.tile_tokens)

    def _run_pass(self, layout: PassLayout) -> Sampler:
        """Compute the pass; returns what draws from its logits."""
        self.forward.routes.known = layout.known_routes(self.rows)
        draws = [] if self.forward.is_on_host else draws_of(layout, self.rows)
        logits, there = self.forward.logits(layout, draws)
        return DeviceSampler(logits, there) if there else HostSampler(logits, self.rows)

    def _commit(self, layout: PassLayout, sampler: Sampler) -> Verification:
        """Draw, write tokens and log-probs, keep the accepted keys and values."""
        rows = self.rows
        verified = verify(layout, rows, sampler)
        target = layout.emitting[verified.emitter]
        logprobs = sampler.logprobs(verified.indices, target, verified.token)
        if not np.isfinite(logprobs).all():
            raise BackendError(
                f"the policy's log-probs are not finite (policy version {self.policy_version}): its weights have probably "
                "diverged; go on from an earlier checkpoint with a smaller update.learning_rate"
            )
        if (replays := rows.replays[target]).any():
            noted = verified.indices[replays]
            rows.keep(target[replays], sampler.kept(noted), sampler.log_masses(noted))
        commit(layout, rows, verified, logprobs, self.policy_version)
        self.kv.states.accept(verified.sampled_at)
        if (reach := self.kv.reach) is not None:
            rows.free_unseen(layout.row, reach)
        return verified

    def _finish(self, layout: PassLayout, verified: Verification) -> list[Completion]:
        """Free the rows that sampled a stop token or reached their limit."""
        rows, row = self.rows, layout.emitting
        full = rows.length[row] == rows.limit[row]
        return [
            self._finish_row(int(row[e]), "stop" if verified.ended[e] else "length")
            for e in np.flatnonzero(verified.ended | full).tolist()
        ]

    def _finish_row(self, row: int, reason: FinishReason) -> Completion:
        completion = self.admission.finish(row, reason)
        self.drafting.finish(completion)
        if self.speedup is not None:
            self.speedup.leave([completion])
        return completion

    def _report(self, layout: PassLayout, verified: Verification, *, seconds: float) -> None:
        """Let observers know of a pass."""
        rows, nodes = len(layout.emits), len(layout.node_index)
        self.totals.preemptions = self.admission.num_preemptions
        self._most_emitting = max(self._most_emitting, rows)
        record = PassRecord(
            rows=rows,
            nodes=nodes,
            asked=self.drafting.num_asked,
            prompt_tokens=layout.num_tokens - rows - nodes,
            seen=layout.num_seen,
            draft_s=self.drafting.take_seconds(),
            seconds=seconds,
            end_s=time.time(),
            num_emitted=len(verified.token),
            is_tail=rows < self._most_emitting / 4 and layout.is_decoding,
        )
        for observe in self.observers:
            observe(record)
