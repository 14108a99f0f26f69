"""What the trainer and a worker apart from it say to one another. L = response tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rhymerl.backends.spans import WorkerSpan
from rhymerl.environments.build import EpisodeSettings
from rhymerl.history.packing import PackedPrompt
from rhymerl.types import Output, RolloutRequest, Sample, Split
from rhymerl.workers.versions import Versions

# One policy's weights on their way, all tensors by name: workers call it when they come to it, and write to none.
WeightSource = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A new policy. Of several that wait, only the newest is loaded."""

    version: int
    source: WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Requests to answer, in this order and behind all of a lower `priority`."""

    requests: Sequence[RolloutRequest]
    priority: int
    versions: Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Give these requests back, as far as they are here and not answered."""

    ids: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryUpdate:
    """Past answers to prompts that are to come."""

    prompts: Sequence[PackedPrompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn:
    """The scored answers of a step, for the drafter."""

    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Tell what happened in the engine since the last time."""


HostMessage = EpisodeSettings | Weights | Submit | Withdraw | HistoryUpdate | Learn | Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """The tokens of an answer from index `start` on, with counts of the whole of it."""

    id: str
    start: int
    output: Output  # output[start:]

    def applied_to(self, known: Output | None) -> Output:
        """Return the answer so far, of which `known` has been told before."""
        if not self.start:
            return self.output
        assert known is not None
        return known[: self.start].followed_by(self.output)


@dataclass(slots=True, kw_only=True)
class Events:
    """What a worker has to tell since the last time."""

    finished: list[tuple[str, Output]] = field(default_factory=list)
    released: list[tuple[str, Output]] = field(default_factory=list)  # withdrawn, with what there is of them
    deltas: list[OutputDelta] = field(default_factory=list)  # of answers that go on; drafts of answers too
    forgotten: list[tuple[Split, str]] = field(default_factory=list)  # prompts whose history did not fit
    measured: list[Mapping[str, float]] = field(default_factory=list)  # an answer to each `Measure`
    version: int | None = None  # of the policy with which it samples; None before the first
    spans: list[WorkerSpan] = field(default_factory=list)  # what it did; by numbers, it is worker 0
    history_bytes: int = 0
    error: Exception | None = None  # its end

    @property
    def is_urgent(self) -> bool:
        """Return whether somebody may wait for it."""
        return bool(self.finished or self.released or self.measured or self.error)
