"""Steps one after another: barriers, run-ahead and training, with the scheduler that training would have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from rhymerl.progress import SILENT, ProgressBar
from rhymerl.schedulers.base import Scheduler
from rhymerl.simulation.base import Decoding, Pipeline, StepWork, Timeline
from rhymerl.simulation.step import StepRun, course_of
from rhymerl.types import Completion, FloatArray, Output, Sample, TurnEnd
from rhymerl.workers import RunAhead, StepRequests, check_run_ahead
from rhymerl.workers.coordinator import Coordinator, SharedPlan, make_plan, wants_progress
from rhymerl.workers.run_ahead_rules import rule_of
from rhymerl.workers.versions import Versions

_NO_TOKENS, _NO_NUMBERS, _NO_MASK = np.empty(0, np.int32), np.empty(0), np.empty(0, np.bool_)
_NO_REWARDS: dict[str, float] = {}


@dataclass(eq=False)
class Simulation:
    """`num_workers` workers answer one step after another; `Versions` says by which policies.

    off: a step begins everywhere when the policy that the step before has trained is there. keep: a worker that has
    finished its queue begins that of the next step, if all older steps have been trained; so no token is sampled by a
    policy older than one step. draft: the same, but the tokens are sampled again after the update, along the earlier
    ones as drafts. auto: draft where that pays (`DraftWherePays`), with plans for workers that wait
    (`OnPolicyScheduler`). Colocated workers stop while the policy is trained, which takes `train_time`, and gets to
    them, which takes `weight_delay` more; disaggregated ones go on as `run_ahead` allows. Plans and moves are ordered
    by the `Coordinator` that a run has, which asks the scheduler to rebalance after each time `rebalance_every`, if it
    migrates requests; only decoding is simulated.
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
        """Run all steps. Raises HookError, naming scheduler and request, for a plan that is no partition."""
        self.scheduler.work_for(self.decoding.max_running)
        steps: list[dict[str, Any]] = []
        apart = self.pipeline == "disaggregated"
        train_time, delay = (self.train_time, self.weight_delay) if apart else (0.0, 0.0)
        published = [0.0]  # when the policy of each version is there; that of step s has version s
        free = np.zeros(self.num_workers)
        plan: SharedPlan | None = None
        rule = rule_of(self.run_ahead)
        drafts = np.zeros(len(works[0].requests)) if works else np.zeros(0)
        for step, work in enumerate(works):
            now = published[step]
            following = works[step + 1] if step + 1 < len(works) and rule.begins() else None
            versions, after = (Versions.of(each, rule.mode, self.max_staleness) for each in (step, step + 1))
            opened = published[max(versions.final, step - 1, 0)]  # the step before has planned it, under its own policy
            plan = plan or make_plan(self._planner, work.requests, num_workers=self.num_workers, step=step)
            run = StepRun(work, plan.queues, np.maximum(free, opened), drafts, decoding=self.decoding)
            stale_tokens = float(run.sampled(now).sum())
            plan = self._decode(run, plan, following, step, now=now)
            free, done = run.ends, float(run.ends.max())
            published.append(max(done, now - delay) + train_time + delay)
            steps.append(_figures(run, opened=opened, done=done, stale_tokens=stale_tokens, published=published[-2:]))
            rule.note(float(np.minimum(drafts, work.lengths).sum()) / max(int(work.lengths.sum()), 1))
            if following is not None and plan is not None and after.oldest < after.final:
                drafts, steps[-1]["ahead"] = self._run_ahead(following, plan, free, until=published[-1])
            elif step + 1 < len(works):
                drafts = np.zeros(len(works[step + 1].requests))
            if self._learns:
                self.scheduler.learn(samples_of(work, self.decoding, lasting=run.finished - run.firsts))
            progress.advance()
        return _timeline(steps)

    def _decode(
        self, run: StepRun, plan: SharedPlan, following: StepWork | None, step: int, *, now: float
    ) -> SharedPlan | None:
        """Run the step from `now` on by its coordinator's decisions; return the next step's plan, if there is one.

        The coordinator is asked at the times at which its answer may change.
        """
        to_come = following.requests if following is not None else None
        coordinator = Coordinator(
            self._planner,
            StepRequests(step=step, requests=run.work.requests, following=to_come),
            plan,
            keeps=self.run_ahead == "keep",
            every=self.rebalance_every,
            clock=lambda: now,
            works_on=self.pipeline == "disaggregated",
        )
        planned: SharedPlan | None = None
        while True:
            report = run.report(now, tells_tokens=wants_progress(self._planner))
            command = coordinator.decide([(0, report)])
            if command is not None:
                run.move(command.moves, now)
                planned = command.plan or planned
            if command is not None and command.is_done:
                return planned
            times = [float(run.ends.max())]
            if following is not None and planned is None:
                times.append(run.nearly_done())
            if self._planner.migrates:
                times.append(coordinator.asks_at)
            now = max(now, min(times))

    def _run_ahead(
        self, work: StepWork, plan: SharedPlan, free: FloatArray, *, until: float
    ) -> tuple[FloatArray, FloatArray]:
        """Return the next step's tokens prefetched before its policy is there, [R], and the time for that, [W].

        With `draft` or `auto`, that policy then samples again along them. Colocated workers train instead.
        """
        sampled = np.zeros(len(work.requests))
        spent = np.zeros(self.num_workers)
        for worker, indices in enumerate(plan.queues):
            queue = np.asarray(indices, np.int64)
            nothing = np.zeros(len(queue))
            start = float(free[worker])
            course = course_of(work, queue, start, nothing, self.decoding, before=nothing, waited=nothing)
            sampled[queue] = course.sampled(until)
            spent[worker] = min(course.end, until) - start
        return self.decoding.redone(sampled), spent


def check_modes(run_ahead: str, max_staleness: int, pipeline: str) -> None:
    """Raise ValueError for modes that do not exist or contradict one another."""
    check_run_ahead(run_ahead, max_staleness)
    if pipeline not in ("colocated", "disaggregated"):
        raise ValueError(f"pipeline={pipeline!r}: expected one of colocated, disaggregated")


def samples_of(work: StepWork, decoding: Decoding, *, lasting: FloatArray | None = None) -> list[Sample]:
    """Return finished answers with the right lengths and waits, `lasting` [R]; nothing else of them has a meaning."""
    zeros = np.zeros(int(work.lengths.max(initial=0)), np.int32)
    num_passes = np.maximum(work.lengths / decoding.tokens_per_pass, 1.0).round()
    num_drafted = (num_passes * (decoding.verified - 1)).round()
    columns = (work.lengths, work.is_cut, num_passes.astype(np.int64), num_drafted.astype(np.int64))
    turns = _turns_of(work, lasting) if lasting is not None else [()] * len(work.requests)
    samples = []
    for request, ended, length, is_cut, passes, drafted in zip(
        work.requests, turns, *(column.tolist() for column in columns), strict=True
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
                turns=ended,
            ),
        )
        samples.append(Sample(completion=completion, text="", reward=0.0, rewards=_NO_REWARDS, loss_mask=_NO_MASK))
    return samples


def _turns_of(work: StepWork, lasting: FloatArray) -> list[tuple[TurnEnd, ...]]:
    """Return the turns of episodes that lasted so long; none where nobody waits."""
    if work.turns is None or work.waits is None:
        return [()] * len(work.requests)
    columns = (work.lengths, work.turns, work.waits, lasting)
    return [
        tuple(_turn(length * number // turns, wait / turns, seconds * number / turns) for number in range(1, turns + 1))
        for length, turns, wait, seconds in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _turn(end: int, waited_s: float, replied_at: float) -> TurnEnd:
    return TurnEnd(start=end, stop=end, text="", waited_s=waited_s, replied_at=replied_at)


def _figures(
    run: StepRun, *, opened: float, done: float, stale_tokens: float, published: Sequence[float]
) -> dict[str, Any]:
    """Return a step's part of a timeline; `published` are the times of its own and of its trained policy."""
    return {
        "starts": run.starts,
        "ends": run.ends,
        "ahead": np.zeros(len(run.starts)),
        "done": done,
        "trained": published[1],
        "tokens": float(run.work.lengths.sum()),
        "stale_tokens": stale_tokens,
        "staleness": int((run.firsts < published[0]).any()),
        "moves": run.num_moves,
        "tails": run.tails(),
        "waits": run.firsts - opened,
        "latencies": run.finished - opened,
    }


def _timeline(steps: Sequence[Mapping[str, Any]]) -> Timeline:
    columns: dict[str, Any] = {name: [each[name] for each in steps] for name in steps[0]}
    ragged = {name: columns.pop(name) for name in ("waits", "latencies")}
    arrays: dict[str, Any] = {name: np.array(values) for name, values in columns.items()}
    return Timeline(**arrays, **ragged)
