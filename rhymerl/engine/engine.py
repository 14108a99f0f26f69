"""The embedded engine: continuous batching and tree verification over the policy's own weights."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from rhymerl.budgets.base import Budget
from rhymerl.budgets.fixed import FixedBudget
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.engine.drafting import Drafting
from rhymerl.engine.forward import Forward
from rhymerl.engine.kv_store import KVStore
from rhymerl.engine.layout import PassLayout, lay_out
from rhymerl.engine.ragged import IndexArray
from rhymerl.engine.rows import Counts, Prefix, Rows
from rhymerl.engine.sampler import Sampler
from rhymerl.engine.support import refuse_impossible
from rhymerl.engine.totals import EngineTotals
from rhymerl.engine.tree import no_drafts
from rhymerl.engine.verify import Walk, walk
from rhymerl.errors import BackendError
from rhymerl.types import Completion, FinishReason, Generated, RolloutRequest

_HAND_OVER = 8  # passes


class Engine:
    """Answers requests with continuous batching: a slot frees the moment its request ends, and the next enters.

    `max_running` requests decode side by side; `kv_tokens` bounds the tokens that have keys and values (when it is
    full the youngest request is preempted and recomputed later); `max_pass_tokens` bounds one forward pass.
    `budget` says how much of what `drafter` proposes is verified. With `check_drafts` a malformed draft raises ValueError;
    otherwise it is ignored and counted. `autocast` is entered around every forward.
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
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.model = model
        self.max_running = max_running
        self.max_pass_tokens = max_pass_tokens
        self.policy_version = 0
        self.totals = EngineTotals()
        config = model.config.get_text_config()
        positions = int(getattr(config, "max_position_embeddings", 0) or kv_tokens)
        # Running rows and as many prefixes can never hold more than this.
        self.kv = KVStore(config.num_hidden_layers, min(kv_tokens, 2 * max_running * positions))
        self.forward = Forward(model, self.kv, autocast=autocast)
        self.rows = Rows(2 * max_running + 16, min(positions, self.kv.num_slots), self.kv.pool)
        self.drafting = Drafting(
            drafter or NoDrafter(),
            budget or FixedBudget(),
            self.rows,
            self.totals,
            vocabulary=config.vocab_size,
            checks=check_drafts,
        )
        self._waiting: deque[tuple[RolloutRequest, Counts]] = deque()
        self._running: list[int] = []  # rows, oldest first
        self._prefixes: dict[bytes, Prefix] = {}  # least recently used first
        self._unfilled: list[Prefix] = []  # those that still have to be computed
        self._allocate()

    def _allocate(self) -> None:
        """Feed one token to the model, which knows the store's shapes.

        So a pass is laid out the same way whether or not others came before, and the first one of a resumed run gives the
        very log-probs that it gave in the whole run.
        """
        row = self.rows.enter_prefix(np.zeros(1, np.int32)).row
        nobody = np.empty(0, np.int64)
        layout = lay_out(self.rows, np.array([row]), np.array([1]), nobody, no_drafts(0))
        with self.forward.ready():
            self.forward.logits(layout)
        self.rows.cached[row] = 1
        self.rows.leave(row)

    # -- the interface of a backend -------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._waiting or self._running)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests. Raises ConfigError, queueing nothing, when one could never be answered."""
        for request in requests:
            refuse_impossible(request, self.rows.context)
        self._waiting.extend((request, Counts()) for request in requests)

    def run(self, deadline: float | None = None, *, max_passes: int | None = None) -> list[Completion]:
        """Step until requests have ended, nothing is left, or `time.monotonic()` has passed `deadline`.

        Completions are handed over every few passes: entering and leaving the engine walks all modules. With `max_passes` they
        are handed over after so many and not before.
        """
        finished: list[Completion] = []
        passes = 0
        with self.forward.ready():
            while self.has_work and (deadline is None or time.monotonic() < deadline):
                if passes == max_passes or (max_passes is None and finished and passes % _HAND_OVER == 0):
                    break
                finished += self.step()
                passes += 1
        return finished

    def step(self) -> list[Completion]:
        """One pass over the running batch; call within `forward.ready()`."""
        started = time.perf_counter()
        self._admit()
        layout = self._lay_out()
        steps = self._commit(layout, self.forward.logits(layout))
        self.drafting.tell(layout, steps, seconds=time.perf_counter() - started)
        finished = self._finish(layout, steps)
        self._account(layout, steps, time.perf_counter() - started)
        return finished

    def progress(self) -> dict[str, int]:
        """Response tokens so far of all requests by id, the running ones first, oldest first."""
        rows, running = self.rows, self._running
        done = (rows.length[running] - rows.prompt_length[running]).tolist()
        brought = {request.id: len(request.generated) if request.generated else 0 for request, _ in self._waiting}
        return {self._id(row): tokens for row, tokens in zip(running, done, strict=True)} | brought

    def withdraw(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """Take back requests, oldest first, with what they have generated; None = all."""
        wanted = None if ids is None else set(ids)
        running = [row for row in self._running if wanted is None or self._id(row) in wanted]
        taken = [self._finish_row(row, "withdrawn") for row in running]
        waiting, self._waiting = self._waiting, deque()
        for request, counts in waiting:
            if wanted is not None and request.id not in wanted:
                self._waiting.append((request, counts))
                continue
            taken.append(_without_row(request, counts))
            if counts.is_started:
                self.drafting.finish(taken[-1])
        return taken

    def new_weights(self, policy_version: int) -> None:
        """The policy has changed: forget all keys and values; running requests go on from their tokens."""
        for row in reversed(self._running.copy()):
            self._preempt(row)
        for prefix in list(self._prefixes.values()):
            self._evict(prefix)
        self.policy_version = policy_version

    # -- one step ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting requests in while there are slots and room for what they bring plus one token a row."""
        while self._waiting and len(self._running) < self.max_running:
            request, counts = self._waiting[0]
            brings = len(request.prompt.token_ids) + (len(request.generated) if request.generated else 0)
            if self._running and brings + len(self._running) > self._room():
                return
            self._waiting.popleft()
            prefix = self._prefix_for(request)
            self._running.append(self.rows.enter(request, prefix, counts))
            if not counts.is_started:
                self.drafting.start(request)

    def _room(self) -> int:
        """Slots that could be had without preempting anybody, less what admitted rows still have to feed."""
        idle = sum(int(self.rows.cached[p.row]) for p in self._prefixes.values() if p.num_readers == 0)
        held = [*self._running, *(p.row for p in self._prefixes.values())]
        owed = int((self.rows.length[held] - self.rows.cached[held]).sum())
        return self.kv.pool.num_free + idle - owed

    def _prefix_for(self, request: RolloutRequest) -> Prefix | None:
        """The shared part of the request's prompt, all but its last token; afterwards there is a row for the request."""
        tokens = request.prompt.token_ids[:-1]
        prefix = self._prefixes.pop(tokens.tobytes(), None)  # out of the table, so that it cannot be evicted
        is_new = prefix is None and len(tokens) > 0
        while self.rows.num_free < 1 + is_new and (idle := self._idle_prefix()):
            self._evict(idle)
        if is_new:
            prefix = self.rows.enter_prefix(tokens)
            self._unfilled.append(prefix)
        if prefix is not None:
            self._prefixes[prefix.tokens] = prefix
        return prefix

    def _idle_prefix(self) -> Prefix | None:
        return next((prefix for prefix in self._prefixes.values() if prefix.num_readers == 0), None)

    def _evict(self, prefix: Prefix) -> None:
        del self._prefixes[prefix.tokens]
        self._unfilled = [each for each in self._unfilled if each is not prefix]
        self.rows.leave(prefix.row)

    def _lay_out(self) -> PassLayout:
        """Choose what each row feeds, make room for it, and ask for drafts."""
        row, chain = self._feed()
        while int(chain.sum()) > self.kv.pool.num_free:
            self._make_room()
            row, chain = self._feed()
        rows, fed = self.rows, int(chain.sum())
        emits = np.flatnonzero(rows.is_request[row] & (rows.cached[row] + chain == rows.length[row]))
        drafts = self.drafting.ask(row[emits], spare=min(self.kv.pool.num_free, self.max_pass_tokens) - fed)
        return lay_out(rows, row, chain, emits, drafts, compiled=self.kv.is_readable_in_place)

    def _feed(self) -> tuple[IndexArray, IndexArray]:
        """Rows that feed and how many of their uncached tokens: prefixes first, then the requests they serve."""
        rows = self.rows
        running = np.array(self._running, np.int64)
        self._unfilled = [prefix for prefix in self._unfilled if rows.cached[prefix.row] < rows.length[prefix.row]]
        if not self._unfilled and (rows.length[running] - rows.cached[running] == 1).all():
            return running, np.ones(len(running), np.int64)
        budget = max(self.max_pass_tokens - len(self._running), 1)
        feeding, chains, unready = [], [], set()
        for row in [*(prefix.row for prefix in self._unfilled), *self._running]:
            owed = int(rows.length[row] - rows.cached[row])
            prefix = rows.prefix[row]
            if prefix is not None and prefix.row in unready:
                continue
            fed = owed if owed == 1 else min(owed, budget)
            budget -= fed if owed > 1 else 0
            if fed < owed:
                unready.add(row)
            if fed:
                feeding.append(row)
                chains.append(fed)
        return np.array(feeding, np.int64), np.array(chains, np.int64)

    def _make_room(self) -> None:
        idle = self._idle_prefix()
        if idle is not None:
            self._evict(idle)
            return
        assert len(self._running) > 1, "a request was admitted that cannot fit"
        self._preempt(self._running[-1])
        self.totals.preemptions += 1

    def _preempt(self, row: int) -> None:
        """Back to the head of the queue; its tokens stay, its keys and values are computed again."""
        counts = self.rows.counts(row)
        request = self.rows.completion(row, "withdrawn").resume()
        self._leave(row)
        self._waiting.appendleft((request, counts))

    def _commit(self, layout: PassLayout, logits: Tensor) -> Walk:
        """Draw, write tokens and log-probs, keep the accepted keys and values."""
        rows, row = self.rows, layout.row[layout.emits]
        start = rows.length[row]
        sampler = Sampler(logits, rows)
        steps = walk(layout, rows, sampler)
        target, place = row[steps.emitter], start[steps.emitter] + steps.level
        rows.tokens[target, place] = steps.token
        rows.logprobs[target, place] = logprobs = sampler.logprobs(steps.place, target, steps.token)
        if not np.isfinite(logprobs).all():
            raise BackendError(
                f"the policy's log-probs are not finite (policy version {self.policy_version}): its weights have probably "
                "diverged; go on from an earlier checkpoint with a smaller update.learning_rate"
            )
        rows.versions[target, place] = self.policy_version
        rows.length[row] = start + steps.num_emitted
        rows.passes[row] += 1
        rows.accepted[row] += steps.num_accepted
        rows.drafted[row] += layout.drafts.counts
        rows.cached[layout.row] += layout.chain
        if len(layout.node_place):
            self._keep_accepted(layout, steps)
        return steps

    def _keep_accepted(self, layout: PassLayout, steps: Walk) -> None:
        """Nodes at which something was drawn are cached now; the slots of all others go back."""
        rows = self.rows
        is_node = layout.logit_level > 0
        kept = steps.drawn_at[is_node]
        slots, depth = layout.slots[layout.node_place], layout.node_depth[kept]
        row = layout.row[layout.emits][layout.logit_row[is_node][kept]]
        rows.slots[row, rows.cached[row] + depth - 1] = slots[kept]
        np.add.at(rows.cached, row, 1)
        rows.pool.give(slots[~kept])

    def _finish(self, layout: PassLayout, steps: Walk) -> list[Completion]:
        """Free the rows that drew a stop token or reached their limit."""
        rows, row = self.rows, layout.row[layout.emits]
        full = rows.length[row] == rows.limit[row]
        return [
            self._finish_row(int(row[e]), "stop" if steps.ended[e] else "length")
            for e in np.flatnonzero(steps.ended | full).tolist()
        ]

    def _finish_row(self, row: int, reason: FinishReason) -> Completion:
        completion = self.rows.completion(row, reason)
        self._leave(row)
        self.drafting.finish(completion)
        return completion

    def _leave(self, row: int) -> None:
        """Free the row, and its prefix if nobody is left to wait until that is computed."""
        rows, prefix = self.rows, self.rows.prefix[row]
        self._running.remove(row)
        rows.leave(row)
        if prefix is not None and prefix.num_readers == 0 and rows.cached[prefix.row] < rows.length[prefix.row]:
            self._evict(prefix)

    def _account(self, layout: PassLayout, steps: Walk, seconds: float) -> None:
        totals = self.totals
        totals.passes += 1
        totals.fed_tokens += layout.num_tokens
        totals.emitted_tokens += len(steps.token)
        totals.request_passes += len(layout.emits)
        totals.busy_s += seconds
        totals.tail_s += seconds if len(layout.emits) < self.max_running / 4 else 0.0

    def _id(self, row: int) -> str:
        request = self.rows.request[row]
        assert request is not None
        return request.id

    def check_integrity(self) -> None:
        """Raise AssertionError unless every KV slot is free or owned by exactly one live row."""
        self.rows.check_integrity([*self._running, *(prefix.row for prefix in self._prefixes.values())])


def _without_row(request: RolloutRequest, counts: Counts) -> Completion:
    nothing = Generated(token_ids=np.empty(0, np.int32), logprobs=np.empty(0), policy_versions=np.empty(0, np.int32))
    return Completion(
        request=request,
        generated=request.generated or nothing,
        finish_reason="withdrawn",
        num_passes=counts.passes,
        num_drafted=counts.drafted,
        num_accepted=counts.accepted,
    )
