"""Steps that end before all of their answers do, simulated for the rules of peers/ that need them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.scheduling.peers.base import EarlyStopScheduler, Group
from rhymerl.simulation.base import Decoding, StepWork
from rhymerl.simulation.step import StepRun
from rhymerl.types import RolloutRequest
from rhymerl.workers import StepRequests
from rhymerl.workers.coordinator import Coordinator, SharedPlan, make_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is trained on."""

    request_id: str
    length: int
    stale: float  # tokens that it had when the step began
    age: int  # steps since it was first launched
    latency: float  # time from then to its last token


@dataclass(slots=True, kw_only=True)
class EarlyStep:
    start: float
    num_asked: int  # requests
    end: float = 0.0
    busy: float = 0.0  # time of workers with work, summed over them
    answers: list[Answer] = field(default_factory=list)


class EarlyStopSimulation:
    """All workers begin a step together, when the one before is over; training takes no time.

    `works` have the prompts in data order, each with all answers that a rule may ask for. What an unfinished request
    has is computed again, in one pass, where it goes on. The scheduler is asked to rebalance after each time `every`.
    """

    def __init__(
        self,
        scheduler: EarlyStopScheduler,
        works: Sequence[StepWork],
        *,
        num_workers: int,
        decoding: Decoding,
        every: float,
    ) -> None:
        self.scheduler = scheduler
        self.num_workers = num_workers
        self.decoding = decoding
        self.every = every
        self.steps: list[EarlyStep] = []
        self.asked: list[int] = []  # lengths of the groups' answers to all prompts that were taken
        self._works = works
        self._is_spent = False
        self._lengths: dict[str, int] = {}
        self._sampled: dict[str, float] = {}  # tokens that a request has from the steps before
        self._first: dict[str, tuple[int, float]] = {}  # step and time of its first launch
        self._ended: dict[str, float] = {}  # time

    def run(self) -> list[EarlyStep]:
        """Return the steps that the data can fill."""
        groups, now = self._groups(), 0.0
        while (asked := self.scheduler.launch(groups)) and not self._is_spent:
            for request in asked:
                self._first.setdefault(request.id, (len(self.steps), now))
            step = EarlyStep(start=now, num_asked=len(asked))
            sampled = self._decode(asked, step)
            step.answers = [self._answer(request) for request in self.scheduler.trained()]
            self._sampled.update(sampled)
            self.steps.append(step)
            now = step.end
        return self.steps

    def _groups(self) -> Iterator[Group]:
        """Every prompt of the data, under a name that no other has."""
        for number, work in enumerate(self._works):
            groups: dict[str, list[RolloutRequest]] = {}
            for request, length in zip(work.requests, work.lengths.tolist(), strict=True):
                prompt = replace(request.prompt, id=f"{number}/{request.prompt.id}")
                named = replace(request, id=f"{number}/{request.id}", prompt=prompt)
                self._lengths[named.id] = length
                groups.setdefault(prompt.id, []).append(named)
            for group in groups.values():
                self.asked += [self._lengths[request.id] for request in group[: self.scheduler.group_size]]
                yield group
        self._is_spent = True

    def _decode(self, asked: list[RolloutRequest], step: EarlyStep) -> dict[str, float]:
        """Run the step until the scheduler says that it is over; return how many tokens its requests have then."""
        plan = make_plan(self.scheduler, asked, num_workers=self.num_workers, step=len(self.steps))
        before = np.array([self._sampled.get(request.id, 0.0) for request in asked])
        again = np.array([before[np.asarray(queue, np.int64)].sum() for queue in plan.queues])
        starts = step.start + self.decoding.pass_cost(again) - self.decoding.pass_cost(np.zeros(self.num_workers))
        lengths = np.array([self._lengths[request.id] for request in asked], np.float64)
        work = StepWork(requests=asked, lengths=lengths - before, is_cut=np.zeros(len(asked), np.bool_))
        run = StepRun(work, plan.queues, starts, np.zeros(len(asked)), decoding=self.decoding)
        step.end = self._until_over(run, plan, step.start)
        step.busy = float((np.minimum(run.ends, step.end) - step.start).clip(min=0).sum())
        sampled = before + run.sampled(step.end)
        return {request.id: have for request, have in zip(asked, sampled.tolist(), strict=True)}

    def _until_over(self, run: StepRun, plan: SharedPlan, start: float) -> float:
        """Tell the scheduler of every answer as it ends, and return when it says that the step is over."""
        asked, now = run.work.requests, start
        work = StepRequests(step=len(self.steps), requests=asked)
        coordinator = Coordinator(self.scheduler, work, plan, keeps=False, every=self.every, clock=lambda: now)
        while True:
            now = coordinator.asks_at
            report = run.report(now, tells_tokens=True)
            for i in sorted(report.finished, key=lambda i: run.finished[i]):
                self._ended[asked[i].id] = float(run.finished[i])
                if self.scheduler.finished(asked[i]):
                    return float(run.finished[i])
            command = coordinator.decide([(0, report)])
            if command is not None and command.is_done:
                return float(run.finished.max())
            if command is not None:
                run.move(command.moves, now)

    def _answer(self, request: RolloutRequest) -> Answer:
        number, since = self._first[request.id]
        return Answer(
            request_id=request.id,
            length=self._lengths[request.id],
            stale=self._sampled.get(request.id, 0.0),
            age=len(self.steps) - number,
            latency=self._ended[request.id] - since,
        )
