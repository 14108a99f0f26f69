"""One step over all workers, with requests that move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.schedulers.base import Move, Progress, check_moves
from rhymerl.simulation.base import Decoding, StepWork
from rhymerl.simulation.course import Course

if TYPE_CHECKING:
    from rhymerl.types import FloatArray, IndexArray

Rebalance = Callable[[Progress], Sequence[Move]]


class StepRun:
    """Decodes the queues `plan` (indices into the step's requests) from `starts` [W] on.

    `drafts` [R] are prefetched tokens along which an answer is sampled again. What a moved request has sampled is
    recomputed on its new worker in one pass that verifies so many tokens more, or the share `decoding.recomputed` of it.
    """

    def __init__(
        self,
        work: StepWork,
        plan: Sequence[IndexArray],
        starts: FloatArray,
        drafts: FloatArray,
        *,
        step: int,
        decoding: Decoding,
        scheduler: str = "scheduler",
    ) -> None:
        self.work = work
        self.step = step
        self.decoding = decoding
        self.scheduler = scheduler
        self.starts = starts
        self.num_moves = 0
        self.stale_tokens: float | None = None
        self.firsts = np.full(len(work.requests), np.nan)
        self.finished = np.full(len(work.requests), np.nan)
        self._planned = np.array([len(queue) for queue in plan], np.int64)
        self._drafts = drafts
        self._before = np.zeros(len(work.requests))  # tokens sampled before the present course
        self._queues = [np.asarray(queue, np.int64) for queue in plan]
        self._at = np.zeros(len(work.requests), np.int64)  # [R] the worker that each request is on
        for worker, queue in enumerate(self._queues):
            self._at[queue] = worker
        self._courses = [self._course(worker, start) for worker, start in enumerate(starts.tolist())]
        self._index = {request.id: number for number, request in enumerate(work.requests)}
        for worker in range(len(plan)):
            self._note(worker)
        self._put_in_order()

    @property
    def ends(self) -> FloatArray:
        """Return when each worker has finished, [W], as things stand."""
        return np.array([course.end for course in self._courses])

    def run(
        self,
        rebalance: Rebalance | None,
        *,
        every: float,
        once: Callable[[Progress], None] | None,
        updated: float,
    ) -> None:
        """Ask `rebalance` after each time `every`, and right before `once`.

        `once` is called when the first worker is free, but not before `updated`, when the step's own policy is there; what has been
        sampled until then is stale.
        """
        now = float(self.starts.min()) + every
        while True:
            ends = self.ends
            first_free = max(float(ends.min()), updated)
            if once is not None and (rebalance is None or first_free <= now):
                self._note_stale(updated, first_free)
                if rebalance is not None:
                    self.ask(rebalance, first_free)
                once(self.progress(first_free))
                once = None
                continue
            if rebalance is None or now >= ends.max():
                self._note_stale(updated, float("inf"))
                return
            self._note_stale(updated, now)
            self.ask(rebalance, now)
            now += every

    def ask(self, rebalance: Rebalance, time: float) -> None:
        """Move what `rebalance` moves at a time."""
        progress = self.progress(time)
        moves = rebalance(progress)
        if moves:
            check_moves(moves, progress, scheduler=self.scheduler)
            self._move(moves, time)

    def sampled(self, time: float) -> FloatArray:
        """Return how many tokens each request has at a time, which is not before the last move, [R]."""
        sampled = np.zeros(len(self._before))
        for queue, course in zip(self._queues, self._courses, strict=True):
            if course.start < time < course.end:
                sampled[queue] = course.sampled(time)
        sampled += self._before
        return np.where(self.finished <= time, self.work.lengths, sampled)

    def progress(self, time: float) -> Progress:
        """Return what is unfinished, for the scheduler."""
        left = self._finished_in_order > time
        order, workers = self._order[left], self._workers[left]
        return Progress(
            step=self.step,
            planned=self._planned,
            requests=[self.work.requests[number] for number in order.tolist()],
            workers=workers,
            num_tokens=self.sampled(time)[order].astype(np.int64),
        )

    def tails(self) -> FloatArray:
        """Return the time in which a worker had at most a quarter of as many requests left as were planned for it, [W]."""
        found = np.zeros(len(self._queues))
        for worker, planned in enumerate(self._planned.tolist()):
            ends = np.sort(self.finished[self._at == worker])
            if planned and len(ends):
                before = len(ends) - 1 - planned // 4
                found[worker] = ends[-1] - max(ends[before] if before >= 0 else 0.0, self.starts[worker])
        return found

    def _note_stale(self, updated: float, now: float) -> None:
        """Note how many tokens are stale, before anything moves after the update."""
        if now >= updated and self.stale_tokens is None:
            self.stale_tokens = float(self.sampled(updated).sum())

    def _move(self, moves: Sequence[Move], time: float) -> None:
        """Stop the workers that are concerned, hand requests over, and go on."""
        indices = dict(zip(self._order.tolist(), self._workers.tolist(), strict=True))
        goals = {self._index[move.request_id]: move.worker for move in moves}
        goals = {number: worker for number, worker in goals.items() if indices[number] != worker}
        touched = sorted({*goals.values(), *(indices[number] for number in goals)})
        recompute = np.zeros(len(self._queues))
        for worker in touched:
            queue, course = self._queues[worker], self._courses[worker]
            self._before[queue] += course.sampled(time)
            left = [number for number in queue.tolist() if self.finished[number] > time]
            self._queues[worker] = np.array([number for number in left if number not in goals], np.int64)
        for number, worker in goals.items():
            self._at[number] = worker
            self._queues[worker] = np.append(self._queues[worker], number)
            recompute[worker] += self.decoding.recomputed * self._before[number]
        for worker in touched:
            start = max(time, float(self.starts[worker]))
            if recompute[worker]:
                load = np.array([0.0, recompute[worker]])
                start += float(np.diff(self.decoding.pass_cost(load))[0])
            if len(self._queues[worker]):
                self._courses[worker] = self._course(worker, start)
                self._note(worker)
            else:
                self._courses[worker] = self._course(worker, time)
        self._put_in_order()
        self.num_moves += len(goals)

    def _put_in_order(self) -> None:
        """Put all requests in order by worker and queue, as `progress` shows them."""
        self._order = np.concatenate(self._queues)
        self._workers = np.repeat(np.arange(len(self._queues)), [len(queue) for queue in self._queues])
        self._finished_in_order = self.finished[self._order]

    def _course(self, worker: int, start: float) -> Course:
        queue = self._queues[worker]
        before = self._before[queue]
        drafts = np.maximum(np.minimum(self._drafts[queue], self.work.lengths[queue]) - before, 0.0)
        return Course(start, self.work.lengths[queue] - before, drafts, self.decoding)

    def _note(self, worker: int) -> None:
        queue, course = self._queues[worker], self._courses[worker]
        self.finished[queue] = course.ends
        first = np.isnan(self.firsts[queue]) | (self._before[queue] == 0)
        self.firsts[queue[first]] = course.firsts[first]
