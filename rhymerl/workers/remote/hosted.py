"""Workers apart from the trainer's ranks: they go on with the next step while the policy is trained."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from rhymerl.backends.spans import WorkerSpan
from rhymerl.history import HistoryStore
from rhymerl.models.sharding import GatheredTensors
from rhymerl.types import Completion, Output, Sample
from rhymerl.workers.base import over_workers
from rhymerl.workers.coordinator import SharedPlan, StepRequests, make_plan, wants_progress
from rhymerl.workers.messages import Learn, Measure, Weights
from rhymerl.workers.remote.pool import WorkerPool
from rhymerl.workers.run_ahead_state import RunAheadState
from rhymerl.workers.step_in_flight import StepInFlight
from rhymerl.workers.versions import Versions

_SLICE_S = 0.05  # between two looks of the coordinator
_MEASURE_S = 10.0  # a worker may take as long to tell of its engine


class HostedWorkers(WorkerPool):
    """`num_workers` workers of a started backend.

    Rank 0 alone speaks with them; the other ranks get no answers to score. A worker that is lost costs the tokens that
    it had not told of: its requests go on elsewhere, and another one takes its place. Tokens follow from the noise of a
    request and from the weights, so they are the same wherever it goes on.

    With `lockstep` workers do so many passes between two exchanges, and half as many as a step took while the policy is
    trained, so that a run repeats bit for bit; a worker that is lost then ends it. Raises ValueError for a backend that
    cannot keep step.
    """

    def __post_init__(self) -> None:
        if self.lockstep and not self.backend.counts_passes:
            raise ValueError(
                f"lockstep=True: {type(self.backend).__name__} cannot count passes, by which its workers keep step; expected embedded engines"
            )
        self._resumed: RunAheadState | None = None
        self._published: int | None = None  # the newest version
        self._next_step: StepInFlight | None = None  # once it has begun ahead
        self._ended_at = time.monotonic()  # the latest `answer`
        self._busy_frac = 0.0
        self._num_exchanges = 0  # of the latest `answer`
        super().__post_init__()

    # -- a step --------------------------------------------------------------------------------------------------

    def answer(self, work: StepRequests) -> Iterator[Completion]:
        if self.ranks.rank != 0:
            return
        started = time.monotonic()
        with self.changed:
            self.take_events()
            step = self._begin(work)
        reports = wants_progress(self.scheduler)
        coordinator = self.coordinator(work, step.plan, works_on=True)
        is_done, self._num_exchanges = False, 0
        while not is_done:
            with self.changed:
                self._listen_a_while(step)
                completed = step.take()
                moved, step.moved = step.moved, {}
                report = step.report(completed, step.num_tokens() if reports else {})
            yield from completed
            coordinator.note_moves(moved)
            command = coordinator.decide([(0, report)])
            if command is None:
                continue
            with self.changed:
                self.move(step, command.moves)
                if command.plan is not None and work.following is not None:
                    self._next_step = self._launch(work.next_step(), command.plan, ahead=1)
            is_done = command.is_done
        with self.changed:
            self.steps_in_flight.remove(step)
            if not step.is_evaluation and self.lockstep and self._next_step is not None:
                # The workers go on with the next step during the update.
                self.step(self.backend.ticks_of_update(self._num_exchanges), waits=False)
        self.num_moves = coordinator.num_moves
        self._account(started)

    def _begin(self, work: StepRequests) -> StepInFlight:
        """Return the step, which may have begun during the update before, or before the run was resumed."""
        begun = self._next_step
        # Further rounds of a step go before the next one.
        if work.number is None or begun is None or begun.work.priority > work.number:
            state = self._resumed if self._resumed is not None and self._resumed.step == work.number else None
            self._resumed = None if state is not None else self._resumed
            return self._launch(work, *self._of_state(state, work))
        self._next_step = None
        if begun.work.step == work.step and begun.work.asked == work.asked:
            begun.work = work
            return begun
        self.abandon(begun)
        return self._launch(work, self._plan(work))

    def _of_state(self, state: RunAheadState | None, work: StepRequests) -> tuple[SharedPlan, Mapping[str, Output]]:
        if state is None or state.asked != work.asked:
            return self._plan(work), {}
        plan = state.plan if len(state.plan.queues) == len(self.handles) else self._plan(work)
        return plan, state.outputs

    def _plan(self, work: StepRequests) -> SharedPlan:
        return make_plan(self.scheduler, work.requests, num_workers=len(self.handles), step=work.step)

    def _launch(
        self, work: StepRequests, plan: SharedPlan, outputs: Mapping[str, Output] | None = None, *, ahead: int = 0
    ) -> StepInFlight:
        """Give workers a step; `ahead` is how many policies later than the newest one it is trained."""
        mode = self.run_ahead if work.number is not None else "off"
        versions = Versions.of(self._version + ahead, mode, self.max_staleness)
        step = StepInFlight(work=work, plan=plan, versions=versions, outputs=dict(outputs or {}))
        self.launch(step)
        return step

    def spans(self) -> list[WorkerSpan]:
        with self.changed:
            return [span for handle in self.handles for span in handle.spans.take()]

    def _account(self, started: float) -> None:
        """Note how busy workers were since the end of the step before."""
        now = time.monotonic()
        with self.changed:
            busy_s = sum(handle.busy_s for handle in self.handles)
            for handle in self.handles:
                handle.busy_s = 0.0
        self.sampled_s = now - self._ended_at
        self._busy_frac = min(busy_s / max(len(self.handles) * (now - self._ended_at), 1e-9), 1.0)
        self.busy_s = self._busy_frac * (now - started) * self.ranks.size
        self._ended_at = now

    def _listen_a_while(self, step: StepInFlight) -> None:
        """Wait until something is new in a step, but not for long."""
        if self.lockstep:
            self._num_exchanges += 1
            # An evaluation leaves no trace in training: not in its passes either.
            self.step(self.backend.ticks_per_exchange, only_evaluates=step.is_evaluation)
        else:
            self.wait(_SLICE_S, lambda: step.finished or step.moved)

    @property
    def num_waiting(self) -> int:
        with self.changed:
            return sum(step.num_waiting for step in self.steps_in_flight)

    @property
    def works_ahead(self) -> bool:
        return self._next_step is not None and not self.lockstep

    def ended_ahead(self) -> list[Completion]:
        with self.changed:
            return self._next_step.unseen() if self._next_step is not None else []

    # -- between steps -------------------------------------------------------------------------------------------

    @property
    def _version(self) -> int:
        return self.weights.version if self.weights is not None else 0

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Publish the weights; each worker loads them in its own time.

        Nobody waits, except perhaps for the first worker. A published version stays. Called on all ranks, each of which
        has a part of sharded ones.
        """
        if policy_version == self._published:
            return
        self._published = policy_version
        if self.ranks.rank != 0:
            if isinstance(named_tensors, GatheredTensors):
                named_tensors.take_part()
            return
        weights = Weights(version=policy_version, source=self.backend.publish(named_tensors))
        with self.changed:
            self.take_events()
            is_first = self.weights is None
            self.publish(weights)
            if is_first and self.backend.starts_together:
                self.wait(None, lambda: all(handle.is_up or handle.is_late for handle in self.handles))

    def learn(self, samples: Sequence[Sample]) -> None:
        if self.backend.learns:
            with self.changed:
                self.take_events()
                self.post(Learn(samples=samples))

    def follow(self, history: HistoryStore) -> None:
        """Set the history; along with requests the pool sends each worker what it lacks of it."""
        self.history = history if self.backend.remembers else None

    def metrics(self) -> Mapping[str, float]:
        if self.ranks.rank != 0:
            return {}
        with self.changed:
            self.take_events()
            asked = [handle for handle in self.handles if handle.is_up]
            for handle in asked:
                handle.measured.clear()
                handle.connection.post(Measure())
            if self.lockstep:
                self.step(0)
            else:
                self.wait(_MEASURE_S, lambda: all(each.measured or not each.is_up for each in asked))
            found = [handle.measured.popleft() for handle in asked if handle.measured]
            return {
                **over_workers(found, [1.0] * len(found)),
                "workers/idle_frac": 1 - self._busy_frac,
                # As floats, which are no counts to be added up over the rounds of a step.
                "workers/up": float(sum(handle.is_up for handle in self.handles)),
                "workers/lost": float(self.num_lost),
                "workers/history_bytes": float(max((handle.history_bytes for handle in self.handles), default=0)),
            }

    def state(self) -> RunAheadState | None:
        with self.changed:
            self.take_events()
            return self._next_step.state() if self._next_step is not None else self._resumed

    def restore(self, state: RunAheadState | None) -> None:
        self._resumed = state
