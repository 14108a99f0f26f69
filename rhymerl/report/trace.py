"""A run as a Chrome trace for Perfetto and chrome://tracing: ranks, workers, passes, rewards, episodes, updates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rhymerl.backends.spans import EVALUATION, WorkerSpan
from rhymerl.folders import writing
from rhymerl.report.base import StepTimes
from rhymerl.report.reading import read_run
from rhymerl.report.steps import read_steps

PASSES = "passes.jsonl.gz"
TRACE = "trace.json"
_PARTS = ("rollout", "reward")  # of a step, from its beginning
_TRAINING = ("old_log_prob", "ref", "values", "advantage", "update")  # from there to its end
_TRACKS = ("steps", "parts", "worker", "passes", "rewards")
_TRAINER = 1_000_000  # as a process, where workers are apart from the ranks

Event = dict[str, Any]


def write_trace(run_dir: Path) -> Path:
    """Write `trace.json` into a run directory from what its steps have recorded; returns the file.

    Raises UsageError and DataError as `read_run` does.
    """
    steps = read_run(run_dir).steps
    workers_apart = bool(steps) and steps[-1].workers_apart
    events = [event for step in steps for event in _of_step(step)]
    if (run_dir / PASSES).exists():
        known = {step.step for step in steps}
        waits: list[tuple[float, float]] = []
        for record in read_steps(run_dir / PASSES):
            if record["step"] in known:
                events += _of_passes(record)
                waits += record.get("waits", ())
        events += _of_waits(waits, trainer=_TRAINER if workers_apart else 0)
    begin_us = min((event["ts"] for event in events), default=0)
    for event in events:
        event["ts"] = round(event["ts"] - begin_us, 1)
    path = run_dir / TRACE
    with writing(path), path.open("w", encoding="utf-8") as file:
        json.dump({"traceEvents": [*_names(events, workers_apart), *events], "displayTimeUnit": "ms"}, file)
    return path


def _of_step(step: StepTimes) -> Iterator[Event]:
    trainer = _TRAINER if step.workers_apart else 0
    begin_s = step.ended_at - step.seconds.get("step", 0.0)
    yield _slice(f"step {step.step}", "steps", trainer, begin_s, step.ended_at)
    training_s = sum(step.seconds.get(part, 0.0) for part in _TRAINING)
    for parts, at_s in ((_PARTS, begin_s), (_TRAINING, step.ended_at - training_s)):
        for part in parts:
            seconds = step.seconds.get(part, 0.0)
            if seconds:
                yield _slice(part, "parts", trainer, at_s, at_s + seconds)
            at_s += seconds
    for span in step.spans:
        yield _slice(_name(span), "worker", span.worker, span.start_s, span.end_s, activity=span.activity)


def _name(span: WorkerSpan) -> str:
    if span.activity == "environment":
        return "waits for environments"
    what = f"policy {span.number}" if span.activity == "weights" else f"answers to step {span.number + 1}"
    return "evaluation" if span.number == EVALUATION else what


def _of_passes(record: Mapping[str, Any]) -> Iterator[Event]:
    for rank, found in enumerate(record["ranks"]):
        for start_s, seconds, requests, tokens, draft_nodes in found["passes"]:
            numbers = {"requests": requests, "tokens": tokens, "draft_nodes": draft_nodes, "step": record["step"]}
            yield _slice("pass", "passes", rank, start_s, start_s + seconds, **numbers)
        for name, at_s in found["rewards"]:
            yield {**_event(name, "rewards", rank, at_s, phase="i", step=record["step"]), "s": "t"}


def _of_waits(waits: Sequence[tuple[float, float]], *, trainer: int) -> Iterator[Event]:
    """Count the episodes that wait for environments, whichever worker has them."""
    changes = [(asked_at, 1) for asked_at, _ in waits] + [(replied_at, -1) for _, replied_at in waits]
    changes.sort(key=lambda change: (change[0], -change[1]))  # what is replied at once is asked before
    for (at_s, _), count in zip(changes, accumulate(change for _, change in changes), strict=True):
        yield _event("episodes that wait", "steps", trainer, at_s, phase="C", episodes=count)


def _slice(name: str, track: str, process: int, start_s: float, end_s: float, **numbers: Any) -> Event:
    event = _event(name, track, process, start_s, phase="X", **numbers)
    return {**event, "dur": round((end_s - start_s) * 1e6, 1)}


def _event(name: str, track: str, process: int, at_s: float, *, phase: str, **numbers: Any) -> Event:
    """Times of events are microseconds."""
    return {
        "name": name,
        "cat": track,
        "ph": phase,
        "ts": at_s * 1e6,
        "pid": process,
        "tid": _TRACKS.index(track),
        "args": numbers,
    }


def _names(events: list[Event], workers_apart: bool) -> Iterator[Event]:
    for process in sorted({event["pid"] for event in events}):
        name = "trainer" if process == _TRAINER else f"{'worker' if workers_apart else 'rank'} {process}"
        yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
        for track in sorted({event["tid"] for event in events if event["pid"] == process}):
            yield {"name": "thread_name", "ph": "M", "pid": process, "tid": track, "args": {"name": _TRACKS[track]}}
