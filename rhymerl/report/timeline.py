"""The timeline of a run: when workers decoded or awaited environments, weights came, and the policy was trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rhymerl.backends.spans import EVALUATION, WorkerSpan
from rhymerl.report.base import Run, StepTimes

_MOST_BARS = 2_000
_TRAINING = ("update", "advantage", "values", "ref", "old_log_prob")  # parts of a step, from its end backwards
_TRAINER = "trainer"

BarKind = Literal["rollout", "ahead", "environment", "update", "weights"]
_BAR_NAMES: Mapping[BarKind, str] = {  # of those that are drawn as bars
    "rollout": "rollout",
    "ahead": "for the next step",
    "environment": "waiting for environments",
    "update": "update",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What a row did from .. to, in seconds since the timeline began.

    `ahead` is decoding for a step before the one before has ended; `environment` is a time with nothing to decode,
    because environments had not replied.
    """

    row: int
    kind: BarKind
    step: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeline:
    """The last steps of a run, as many as a page draws at once."""

    rows: Sequence[str]
    bars: Sequence[Bar]
    step_ends: Sequence[tuple[int, float]]  # step, seconds since the timeline began

    @property
    def kinds(self) -> dict[BarKind, str]:
        """Return the words for each kind of its bars."""
        found = {bar.kind for bar in self.bars}
        return {kind: words for kind, words in _BAR_NAMES.items() if kind in found}


def timeline_of(run: Run) -> RunTimeline | None:
    """Return the timeline of a run; None where nobody noted one."""
    steps = _last(run.steps)
    spans = [span for step in steps for span in step.spans]
    if not spans:
        return None
    workers_apart = steps[-1].workers_apart
    workers = sorted({span.worker for span in spans})
    rows = [f"{'worker' if workers_apart else 'rank'} {worker}" for worker in workers]
    begin_s = min(span.start_s for span in spans)
    ends = {step.step: step.ended_at for step in steps}
    bars = [bar for span in spans for bar in _bars(span, workers.index(span.worker), ends, begin_s)]
    # Ranks train together, so what rank 0 says of the update holds for all of them.
    trainers = [len(rows)] if workers_apart else list(range(len(rows)))
    bars += [bar for step in steps for row in trainers for bar in _training(step, row, begin_s)]
    return RunTimeline(
        rows=[*rows, _TRAINER] if workers_apart else rows,
        bars=bars,
        step_ends=[(step.step, step.ended_at - begin_s) for step in steps],
    )


def _last(steps: Sequence[StepTimes]) -> list[StepTimes]:
    found: list[StepTimes] = []
    num_bars = 0
    for step in reversed(steps):
        num_bars += len(step.spans) + 1
        if found and num_bars > _MOST_BARS:
            break
        found.append(step)
    return found[::-1]


def _bars(span: WorkerSpan, row: int, ends: Mapping[int, float], begin_s: float) -> list[Bar]:
    """Return the bars of a span, which is two where the step before ends in it.

    Spans count steps from 0, as policies are counted; a report counts them from 1, as the run does.
    """
    start_s, end_s = span.start_s - begin_s, span.end_s - begin_s
    if span.activity == "weights":
        return [Bar(row=row, kind="weights", step=span.number, start_s=start_s, end_s=end_s)]
    if span.number == EVALUATION:
        return []
    if span.activity == "environment":
        return [Bar(row=row, kind="environment", step=span.number + 1, start_s=start_s, end_s=end_s)]
    turn_s = ends.get(span.number, span.start_s) - begin_s
    parts: list[tuple[BarKind, float, float]] = [
        ("ahead", start_s, min(end_s, turn_s)),
        ("rollout", max(start_s, turn_s), end_s),
    ]
    return [
        Bar(row=row, kind=kind, step=span.number + 1, start_s=first, end_s=last)
        for kind, first, last in parts
        if last > first
    ]


def _training(step: StepTimes, row: int, begin_s: float) -> list[Bar]:
    seconds = sum(step.seconds.get(part, 0.0) for part in _TRAINING)
    end_s = step.ended_at - begin_s
    return [Bar(row=row, kind="update", step=step.step, start_s=end_s - seconds, end_s=end_s)] if seconds else []
