"""Lengths of answers, sampled or recorded."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rhymerl.errors import at_least, check_ranges, require, require_at_least
from rhymerl.history.traces import TraceRecord, read_trace
from rhymerl.simulation.base import LengthSource, StepWork
from rhymerl.types import Prompt, RolloutRequest, SamplingParams

_LOG = logging.getLogger(__name__)
_NO_TOKENS = np.empty(0, np.int32)


@dataclass(kw_only=True, eq=False)
class SyntheticLengths(LengthSource):
    """Log-normal lengths: `between` and `within` prompts are the standard deviations of their logarithm.

    `mean` is that of step 0 before lengths are cut at `cap` tokens; it grows by the share `growth` a step. A data set
    of `steps_per_epoch` steps is gone through again and again; `rank_correlation` is that of a prompt's log-length from
    one epoch to the next. Answers have `turns` of like length, with a wait for an environment behind each, in the time
    unit of the simulation. `wait` is the mean; waits are as unequal as lengths, and have nothing to do with these.
    """

    prompts_per_step: int = at_least(1, 256)
    group_size: int = at_least(1, 16)
    mean: float = at_least(1, 5300.0)
    between: float = at_least(0, 0.7)
    within: float = at_least(0, 0.35)
    cap: int = at_least(1, 16384)
    growth: float = at_least(-0.99, 0.0)
    rank_correlation: float = 1.0
    steps_per_epoch: int = at_least(1, 5)
    turns: int = at_least(1, 1)
    wait: float = at_least(0, 0.0)

    def __post_init__(self) -> None:
        check_ranges(self)
        require(0 <= self.rank_correlation <= 1, "rank_correlation", self.rank_correlation, "0 to 1")

    def steps(self, num_steps: int, seed: int) -> list[StepWork]:
        source = np.random.default_rng(seed)
        requests = [
            _requests([f"{chunk * self.prompts_per_step + i}" for i in range(self.prompts_per_step)], self)
            for chunk in range(min(self.steps_per_epoch, num_steps))
        ]
        centre = math.log(self.mean) - (self.between**2 + self.within**2) / 2
        prompts = source.standard_normal((len(requests), self.prompts_per_step, 1))
        waits = self._waits(num_steps, np.random.default_rng((seed, 1)))
        found = []
        for step in range(num_steps):
            chunk = step % self.steps_per_epoch
            if chunk == 0 and step > 0:
                new = source.standard_normal(prompts.shape)
                prompts = self.rank_correlation * prompts + math.sqrt(1 - self.rank_correlation**2) * new
            samples = source.standard_normal((self.prompts_per_step, self.group_size))
            logs = centre + step * math.log1p(self.growth) + self.between * prompts[chunk] + self.within * samples
            lengths = np.maximum(np.round(np.exp(logs)), 1).astype(np.int64).ravel()
            cut, lengths = lengths > self.cap, np.minimum(lengths, self.cap)
            found.append(StepWork(requests=requests[chunk], lengths=lengths, is_cut=cut, **next(waits)))
        return found

    def _waits(self, num_steps: int, source: np.random.Generator) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield what the work of each step says of turns and waits: nothing where nobody waits."""
        prompts = source.standard_normal((self.steps_per_epoch, self.prompts_per_step, 1))
        centre = math.log(self.turns * self.wait or 1.0) - (self.between**2 + self.within**2) / 2
        turns = np.full(self.prompts_per_step * self.group_size, self.turns)
        for step in range(num_steps):
            samples = source.standard_normal((self.prompts_per_step, self.group_size))
            waits = np.exp(centre + self.between * prompts[step % self.steps_per_epoch] + self.within * samples)
            yield {"turns": turns, "waits": waits.ravel()} if self.wait else {}


def _requests(names: Sequence[str], lengths: SyntheticLengths) -> list[RolloutRequest]:
    sampling = SamplingParams(max_tokens=lengths.cap)
    return [_request(name, sample, sampling) for name in names for sample in range(lengths.group_size)]


def _request(name: str, sample: int, sampling: SamplingParams) -> RolloutRequest:
    prompt = Prompt(id=name, key=name, token_ids=_NO_TOKENS, text="")
    return RolloutRequest(id=f"{name}/{sample}", prompt=prompt, sample=sample, seed=0, sampling=sampling)


class RecordedLengths(LengthSource):
    """The lengths of a trace, epoch by epoch, `prompts_per_step` prompts a step in the order of the file.

    What is left of an epoch is a smaller step. Nothing is sampled: every seed gives the same. Recorded waits are
    in seconds; without `has_seconds` they are left out, which a warning says. Raises DataError for a broken file.
    """

    def __init__(self, trace: str | Path, *, prompts_per_step: int, has_seconds: bool = False) -> None:
        require_at_least({"prompts_per_step": (prompts_per_step, 1)})
        self.trace = trace
        self.prompts_per_step = prompts_per_step
        records = sorted(read_trace(trace), key=lambda record: record.epoch)
        waits = any(record.waits is not None for record in records)
        if waits and not has_seconds:
            _LOG.warning(
                "trace=%s: its waits for environments are left out, since they are in seconds; costs=FILE has the seconds of a pass",
                trace,
            )
        limit = SamplingParams(max_tokens=max(max(len(record.response_tokens) for record in records), 1))
        self._steps = [
            _work(chunk, limit, with_waits=waits and has_seconds)
            for _, epoch in groupby(records, lambda record: record.epoch)
            for chunk in _chunks(list(epoch), prompts_per_step)
        ]

    def steps(self, num_steps: int, seed: int) -> list[StepWork]:
        return self._steps[:num_steps]


def _chunks(records: Sequence[TraceRecord], size: int) -> list[list[TraceRecord]]:
    groups: dict[str, list[TraceRecord]] = {}
    for record in records:
        groups.setdefault(record.prompt_id, []).append(record)
    names = list(groups)
    parts = [names[start : start + size] for start in range(0, len(names), size)]
    return [[record for name in part for record in groups[name]] for part in parts]


def _work(records: Sequence[TraceRecord], sampling: SamplingParams, *, with_waits: bool) -> StepWork:
    counts: dict[str, int] = {}
    requests = []
    for record in records:  # numbered anew: a joined trace may name a sample twice
        number = counts[record.prompt_id] = counts.get(record.prompt_id, -1) + 1
        requests.append(_request(record.prompt_id, number, sampling))
    waits = [np.zeros(1) if record.waits is None else record.waits for record in records]
    return StepWork(
        requests=requests,
        lengths=np.array([max(record.num_sampled, 1) for record in records], np.int64),
        is_cut=np.array([record.finish_reason != "stop" for record in records], np.bool_),
        turns=np.array(list(map(len, waits))) if with_waits else None,
        waits=np.array(list(map(np.sum, waits))) if with_waits else None,
    )
