"""A run as a report shows it. N = answers; what the run directory lacks is empty or None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from rhymerl.backends.spans import WorkerSpan
from rhymerl.types import BoolArray, FloatArray, IndexArray

Curve: TypeAlias = Mapping[int, float]  # a metric by step, or another figure by what it is counted by; ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """When a step was: its end in Unix time, what workers did, and its metrics `timing_s/...`."""

    step: int  # from 1
    ended_at: float
    spans: Sequence[WorkerSpan]
    seconds: Mapping[str, float]  # by part
    workers_apart: bool  # they go on while the policy is trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers of all steps, as columns in the order of the steps."""

    step: IndexArray  # [N] from 1
    epoch: IndexArray  # [N]
    prompt: IndexArray  # [N] into prompt_ids
    sample: IndexArray  # [N]
    reward: FloatArray  # [N]
    change: FloatArray  # [N] of the prompt's mean reward since the epoch in which it was before; NaN the first time
    tokens: IndexArray  # [N]
    passes: IndexArray  # [N]
    drafted: IndexArray  # [N] draft nodes verified
    accepted: IndexArray  # [N] of these
    is_cut: BoolArray  # [N] at the token limit
    prompt_ids: Sequence[str]
    texts: Mapping[int, Mapping[str, Any]]  # of some of them, by their index, as a page gets them

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that a report shows of a run."""

    path: Path
    name: str
    settings: Mapping[str, str] = field(default_factory=dict)  # by dotted key
    summary: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)  # by the names of docs/metrics.md
    evaluations: Mapping[str, Curve] = field(default_factory=dict)
    step_name: str = "step"  # what the x of curves counts
    steps: Sequence[StepTimes] = ()  # the last ones
    answers: Answers | None = None
    similarity: Curve = field(default_factory=dict)  # by epoch, to the one before
    warnings: Sequence[tuple[int, str]] = ()  # of the run, by step
    holding: Sequence[str] = ()  # of these: which hold in the latest step
    facts: Mapping[str, str] = field(default_factory=dict)  # model, data, device, ..., of the latest start
    began_at: float | None = None  # in Unix time, at first
    missing: Sequence[str] = ()  # sentences for people: what could not be shown, and why

    @property
    def past_warnings(self) -> list[tuple[int, str]]:
        return [(step, words) for step, words in self.warnings if words not in self.holding]

    def has(self, name: str) -> bool:
        """Return whether a metric was logged and ever other than 0."""
        return name in self.curves and any(self.curves[name].values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What a page says of runs that are being watched."""

    states: Sequence[str]  # a sentence a run
    read_at: str
    goes_on: bool  # any of them, so that the page will be loaded again
