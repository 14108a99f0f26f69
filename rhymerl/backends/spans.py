"""Spans of time in which a worker decoded, waited for environments or loaded weights, for the timeline of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

EVALUATION = -1  # in the place of a step
_GAP_S = 0.02  # which nobody sees on a timeline
# `environment`: it had nothing to decode, because environments had not replied.
Activity: TypeAlias = Literal["decode", "environment", "weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpan:
    """What a worker did from .. to, in Unix time of its own machine."""

    worker: int
    activity: Activity
    number: int  # the step that it was for, or EVALUATION; of weights their version
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class SpanLog:
    """The spans of a worker since they were last taken; those of one activity with short gaps are one.

    A wait for environments in such a gap is left out.
    """

    def __init__(self, worker: int = 0) -> None:
        self.worker = worker
        self._spans: list[WorkerSpan] = []

    def note(self, activity: Activity, number: int, *, seconds: float) -> None:
        """Note an activity that has just ended, after `seconds`."""
        end_s = time.time()
        start_s = end_s - seconds
        self.add(WorkerSpan(worker=self.worker, activity=activity, number=number, start_s=start_s, end_s=end_s))

    def add(self, span: WorkerSpan) -> None:
        """Note a span that some other log has given, as one of this worker's."""
        spans = self._spans
        if len(spans) > 1 and spans[-1].activity == "environment" and self._goes_on(spans[-2], span):
            spans.pop()
        if spans and self._goes_on(spans[-1], span):
            spans[-1] = replace(spans[-1], end_s=span.end_s)
        else:
            spans.append(replace(span, worker=self.worker))

    def _goes_on(self, last: WorkerSpan, span: WorkerSpan) -> bool:
        is_same = (last.activity, last.number) == (span.activity, span.number)
        return is_same and span.start_s - last.end_s <= _GAP_S

    def take(self) -> list[WorkerSpan]:
        """Return them, the oldest first, and forget them."""
        spans, self._spans = self._spans, []
        return spans
