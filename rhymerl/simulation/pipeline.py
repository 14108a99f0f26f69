"""Steps one after another: barriers, run-ahead and training, with the scheduler that training would have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rhymerl.progress import SILENT, ProgressBar
from rhymerl.schedulers.base import Plan, Progress, Scheduler, check_plan
from rhymerl.simulation.base import Decoding, Pipeline, StepWork, Timeline
from rhymerl.simulation.course import Course
from rhymerl.simulation.step import StepRun
from rhymerl.types import Completion, Output, Sample
from rhymerl.workers import RunAhead, check_run_ahead
from rhymerl.workers.auto import rule_of

if TYPE_CHECKING:
    from rhymerl.types import FloatArray, IndexArray

_NO_TOKENS, _NO_NUMBERS, _NO_MASK = np.empty(0, np.int32), np.empty(0), np.empty(0, np.bool_)
_NO_REWARDS: dict[str, float] = {}


@dataclass(eq=False)
class Simulation:
    """`num_workers` workers answer one step after another.

    off: a step begins everywhere when the policy that the step before has trained is there.
    keep: a worker that has finished its queue begins that of the next step, if all older steps have been trained; so no
    token is sampled by a policy older than one step.
    draft: the same, but the tokens are sampled again after the update, along the earlier ones as drafts.
    auto: draft where that pays (`DraftWherePays`), with plans for workers that wait (`OnPolicyScheduler`).
    Colocated workers stop while the policy is trained, which takes `train_time`, and gets to them, which takes `weight_delay` more;
    disaggregated ones go on as `run_ahead` allows.
    The scheduler is asked to rebalance after each time `rebalance_every`, if it migrates requests.
    """

    scheduler: Scheduler
    _: KW_ONLY
    num_workers: int = 64
    run_ahead: RunAhead = "keep"
    max_staleness: int = 1
    pipeline: Pipeline = "colocated"
    train_time: float = 0.0
    weight_delay: float = 0.0
    rebalance_every: float = 512.0
    decoding: Decoding = field(default_factory=Decoding)

    def __post_init__(self) -> None:
        check_modes(self.run_ahead, self.max_staleness, self.pipeline)
        self._planner = rule_of(self.run_ahead).planner(self.scheduler)
        self._learns = type(self.scheduler).learn is not Scheduler.learn

    @property
    def pause(self) -> float:
        """Return the time of a step in which all workers stop, which the timeline leaves out."""
        return self.train_time + self.weight_delay if self.pipeline == "colocated" else 0.0

    def run(self, works: Sequence[StepWork], *, progress: ProgressBar = SILENT) -> Timeline:
        """Run all steps. Raises ValueError, naming scheduler and request, for a plan that is no partition."""
        self.scheduler.work_for(self.decoding.max_running)
        log = _Log(self.num_workers)
        apart = self.pipeline == "disaggregated"
        train_time, delay = (self.train_time, self.weight_delay) if apart else (0.0, 0.0)
        trained = [0.0, 0.0]  # of the two steps before
        free = np.zeros(self.num_workers)
        plan: Plan | None = None
        rule = rule_of(self.run_ahead)
        drafts = np.zeros(len(works[0].requests)) if works else np.zeros(0)
        for step, work in enumerate(works):
            opened = trained[-2] if self.run_ahead == "keep" else trained[-1]
            starts = np.maximum(free, opened)
            plan = plan if plan is not None else self._plan(work, step)
            run = self._step_run(work, plan, starts, drafts, step)
            following = works[step + 1] if step + 1 < len(works) and rule.begins() else None
            plan = self._decode(run, following, step, updated=trained[-1])
            done = float(run.ends.max())
            there = max(done, trained[-1] - delay) + train_time + delay
            log.add(run, done=done, trained=there, opened=opened, policy_since=trained[-1])
            free = run.ends
            trained = [trained[-1], there]
            rule.note(float(np.minimum(drafts, work.lengths).sum()) / max(int(work.lengths.sum()), 1))
            if following is not None and plan is not None and rule.mode == "draft":
                drafts = self._run_ahead(following, plan, free, trained[-1], log)
            elif step + 1 < len(works):
                drafts = np.zeros(len(works[step + 1].requests))
            if self._learns:
                self.scheduler.learn(samples_of(work, self.decoding))
            progress.advance()
        return log.timeline()

    def _plan(self, work: StepWork, step: int) -> Plan:
        plan = self._planner.plan(work.requests, self.num_workers, step)
        check_plan(plan, work.requests, num_workers=self.num_workers, scheduler=type(self.scheduler).__name__)
        return plan

    def _step_run(self, work: StepWork, plan: Plan, starts: FloatArray, drafts: FloatArray, step: int) -> StepRun:
        name = type(self.scheduler).__name__
        return StepRun(work, _indices(work, plan), starts, drafts, step=step, decoding=self.decoding, scheduler=name)

    def _decode(self, run: StepRun, following: StepWork | None, step: int, *, updated: float) -> Plan | None:
        """Run the step; with run-ahead the next one is planned when the first worker has nothing left to do."""
        planned: list[Plan] = []

        def plan_ahead(progress: Progress) -> None:
            assert following is not None
            if self.run_ahead == "keep":
                self.scheduler.observe(progress)
            planned.append(self._plan(following, step + 1))

        run.run(
            self._planner.rebalance if self._planner.migrates else None,
            every=self.rebalance_every,
            once=plan_ahead if following is not None else None,
            updated=updated,
        )
        return planned[0] if planned else None

    def _run_ahead(self, work: StepWork, plan: Plan, free: FloatArray, until: float, log: _Log) -> FloatArray:
        """Return how many tokens of the next step are prefetched until its policy is there, [R].

        With `draft` or `auto`, that policy then samples again along them. Colocated workers train instead.
        """
        sampled = np.zeros(len(work.requests))
        spent = np.zeros(self.num_workers)
        for worker, queue in enumerate(_indices(work, plan)):
            lengths = work.lengths[queue].astype(np.float64)
            course = Course(float(free[worker]), lengths, np.zeros(len(queue)), self.decoding)
            sampled[queue] = course.sampled(until)
            spent[worker] = min(course.end, until) - free[worker]
        log.ahead[-1] = spent
        return self.decoding.redone(sampled)


def check_modes(run_ahead: str, max_staleness: int, pipeline: str) -> None:
    """Raise ValueError for modes that do not exist or contradict one another."""
    check_run_ahead(run_ahead, max_staleness)
    if pipeline not in ("colocated", "disaggregated"):
        raise ValueError(f"pipeline={pipeline!r}: expected one of colocated, disaggregated")


def _indices(work: StepWork, plan: Plan) -> list[IndexArray]:
    number = {request.id: i for i, request in enumerate(work.requests)}
    return [np.array([number[request.id] for request in queue], np.int64) for queue in plan]


def samples_of(work: StepWork, decoding: Decoding) -> list[Sample]:
    """Return finished answers of the right lengths; nothing else about them means anything."""
    zeros = np.zeros(int(work.lengths.max(initial=0)), np.int32)
    num_passes = np.maximum(work.lengths / decoding.tokens_per_pass, 1.0).round()
    num_drafted = (num_passes * (decoding.verified - 1)).round()
    columns = (work.lengths, work.is_cut, num_passes.astype(np.int64), num_drafted.astype(np.int64))
    samples = []
    for request, length, is_cut, passes, drafted in zip(
        work.requests, *(column.tolist() for column in columns), strict=True
    ):
        tokens = zeros[:length]
        completion = Completion(
            request=request,
            output=Output(
                token_ids=tokens,
                logprobs=_NO_NUMBERS,
                policy_versions=_NO_TOKENS,
                finish_reason="length" if is_cut else "stop",
                num_passes=passes,
                num_drafted=drafted,
            ),
        )
        samples.append(Sample(completion=completion, text="", reward=0.0, rewards=_NO_REWARDS, loss_mask=_NO_MASK))
    return samples


class _Log:
    """Collects a timeline."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.steps: list[dict[str, Any]] = []
        self.ahead: list[FloatArray] = []

    def add(self, run: StepRun, *, done: float, trained: float, opened: float, policy_since: float) -> None:
        self.ahead.append(np.zeros(self.num_workers))
        self.steps.append(
            {
                "starts": run.starts,
                "ends": run.ends,
                "done": done,
                "trained": trained,
                "tokens": float(run.work.lengths.sum()),
                "stale_tokens": run.stale_tokens or 0.0,
                "staleness": int((run.firsts < policy_since).any()),
                "moves": run.num_moves,
                "tails": run.tails(),
                "waits": run.firsts - opened,
                "latencies": run.finished - opened,
            }
        )

    def timeline(self) -> Timeline:
        columns = {name: [each[name] for each in self.steps] for name in self.steps[0]}
        ragged: dict[str, Any] = {name: columns.pop(name) for name in ("waits", "latencies")}
        arrays: dict[str, Any] = {name: np.array(values) for name, values in columns.items()}
        return Timeline(**arrays, **ragged, ahead=np.array(self.ahead))
