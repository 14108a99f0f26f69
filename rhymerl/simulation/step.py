"""One step over all workers, with requests that move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rhymerl.simulation.base import Decoding, StepWork
from rhymerl.simulation.course import Course
from rhymerl.simulation.episodes import EpisodeCourse, left_of
from rhymerl.types import FloatArray, IndexArray
from rhymerl.workers.coordinator import ProgressReport, few_left


class StepRun:
    """Decodes the queues `plan` (indices into the step's requests) from `starts` [W] on.

    `drafts` [R] are prefetched tokens along which an answer is sampled again. What a moved request has sampled is
    recomputed on its new worker in one pass that verifies so many tokens more, or the share `decoding.recomputed` of
    it.
    """

    def __init__(
        self,
        work: StepWork,
        plan: Sequence[Sequence[int]],
        starts: FloatArray,
        drafts: FloatArray,
        *,
        decoding: Decoding,
    ) -> None:
        self.work = work
        self.decoding = decoding
        self.starts = starts
        self.num_moves = 0
        self.firsts = np.full(len(work.requests), np.nan)
        self.finished = np.full(len(work.requests), np.nan)
        self._planned = np.array([len(queue) for queue in plan], np.int64)
        self._drafts = drafts
        self._before = np.zeros(len(work.requests))  # tokens sampled before the present course
        self._waited = np.zeros(len(work.requests))  # and the time of waits before it
        self._queues = [np.asarray(queue, np.int64) for queue in plan]
        self._at = np.zeros(len(work.requests), np.int64)  # [R] the worker that each request is on
        for worker, queue in enumerate(self._queues):
            self._at[queue] = worker
        self._courses = [self._course(worker, start) for worker, start in enumerate(starts.tolist())]
        self._is_reported = np.zeros(len(work.requests), np.bool_)
        self._nearly_done = np.zeros(len(plan))  # [W]
        for worker in range(len(plan)):
            self._note(worker)

    @property
    def ends(self) -> FloatArray:
        """Return when each worker has finished, [W], as things stand."""
        return np.array([course.end for course in self._courses])

    def nearly_done(self) -> float:
        """Return when the first worker has so few requests left that the next step is planned, as things stand."""
        return float(self._nearly_done.min())

    def report(self, time: float, *, tells_tokens: bool) -> ProgressReport:
        """Return what has ended by a time, since the report before, and how far the others are, if that is wanted."""
        is_over = self.finished <= time
        finished, left = np.flatnonzero(is_over & ~self._is_reported), np.flatnonzero(~is_over)
        self._is_reported = is_over
        tokens = self.sampled(time)[left].astype(np.int64).tolist() if tells_tokens else []
        return ProgressReport(finished=finished.tolist(), tokens=dict(zip(left.tolist(), tokens, strict=False)))

    def sampled(self, time: float) -> FloatArray:
        """Return how many tokens each request has at a time, which is not before the last move, [R]."""
        sampled = np.zeros(len(self._before))
        for queue, course in zip(self._queues, self._courses, strict=True):
            if course.start < time < course.end:
                sampled[queue] = course.sampled(time)
        sampled += self._before
        return np.where(self.finished <= time, self.work.lengths, sampled)

    def tails(self) -> FloatArray:
        """Return the time in which a worker had at most a quarter of its planned requests left, [W]."""
        found = np.zeros(len(self._queues))
        for worker, planned in enumerate(self._planned.tolist()):
            ends = np.sort(self.finished[self._at == worker])
            if planned and len(ends):
                before = len(ends) - 1 - planned // 4
                found[worker] = ends[-1] - max(ends[before] if before >= 0 else 0.0, self.starts[worker])
        return found

    def move(self, moves: Mapping[int, int], time: float) -> None:
        """Stop the workers that are concerned, hand unfinished requests (by index) over to others, and go on."""
        self.num_moves += len(moves)
        touched = sorted({*moves.values(), *(int(self._at[number]) for number in moves)})
        recompute = np.zeros(len(self._queues))
        for worker in touched:
            queue, course = self._queues[worker], self._courses[worker]
            self._before[queue] += course.sampled(time)
            self._waited[queue] += course.waited(time)
            left = [number for number in queue.tolist() if self.finished[number] > time]
            self._queues[worker] = np.array([number for number in left if number not in moves], np.int64)
        for number, worker in moves.items():
            self._at[number] = worker
            self._queues[worker] = np.append(self._queues[worker], number)
            recompute[worker] += self.decoding.recomputed * self._before[number]
        for worker in touched:
            start = max(time, float(self.starts[worker]))
            if recompute[worker]:
                load = np.array([0.0, recompute[worker]])
                start += float(np.diff(self.decoding.pass_cost(load))[0])
            self._courses[worker] = self._course(worker, start if len(self._queues[worker]) else time)
            self._note(worker)

    def _course(self, worker: int, start: float) -> Course | EpisodeCourse:
        queue = self._queues[worker]
        before, waited = self._before[queue], self._waited[queue]
        drafts = np.maximum(np.minimum(self._drafts[queue], self.work.lengths[queue]) - before, 0.0)
        return course_of(self.work, queue, start, drafts, self.decoding, before=before, waited=waited)

    def _note(self, worker: int) -> None:
        queue, course = self._queues[worker], self._courses[worker]
        self.finished[queue] = course.ends
        first = np.isnan(self.firsts[queue]) | (self._before[queue] == 0)
        self.firsts[queue[first]] = course.firsts[first]
        last = len(queue) - 1 - few_left(int(self._planned[worker]))
        self._nearly_done[worker] = np.partition(course.ends, last)[last] if last >= 0 else -np.inf


def course_of(
    work: StepWork,
    queue: IndexArray,
    start: float,
    drafts: FloatArray,
    decoding: Decoding,
    *,
    before: FloatArray,
    waited: FloatArray,
) -> Course | EpisodeCourse:
    """Return the course of requests, by index, of which so many tokens are there, and which have waited so long."""
    lengths = work.lengths[queue].astype(np.float64)
    if work.turns is None or work.waits is None:
        return Course(start, lengths - before, drafts, decoding)
    turns = work.turns[queue]
    tokens, waits = left_of(lengths, turns, before), left_of(work.waits[queue], turns, waited)
    return EpisodeCourse(start, tokens, waits, drafts, decoding)
