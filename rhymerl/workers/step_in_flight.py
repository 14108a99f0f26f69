"""The requests of a step that workers answer: who has which, and what is known of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from rhymerl.types import Completion, Output, RolloutRequest
from rhymerl.workers.coordinator import ProgressReport, SharedPlan, StepRequests
from rhymerl.workers.messages import OutputDelta, Submit
from rhymerl.workers.run_ahead_state import RunAheadState
from rhymerl.workers.versions import Versions


@dataclass(slots=True, kw_only=True)
class StepInFlight:
    """A step that is being answered. Every request has one worker, or is finished."""

    work: StepRequests
    plan: SharedPlan
    versions: Versions
    outputs: dict[str, Output] = field(default_factory=dict)  # by request id, as far as they are told
    worker: dict[str, int] = field(default_factory=dict)  # of unfinished requests
    finished: deque[str] = field(default_factory=deque)  # that nobody has taken yet
    num_seen: int = 0  # of these, from the first on
    goals: dict[str, int] = field(default_factory=dict)  # the worker that gets a request once its own has given it back
    moved: dict[int, int] = field(default_factory=dict)  # by index, those that went elsewhere because a worker was lost
    index: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.index = {request.id: number for number, request in enumerate(self.work.requests)}

    @property
    def is_evaluation(self) -> bool:
        return self.work.number is None

    @property
    def num_waiting(self) -> int:
        """Return how many episodes wait for their environment, as far as they are told."""
        return sum(output.finish_reason == "turn" for output in self.outputs.values())

    def request(self, name: str) -> RolloutRequest:
        """Return a request with what is known of its answer: its beginning, or a draft of it."""
        return self.versions.going_on(self.work.requests[self.index[name]], self.outputs.get(name))

    def submit(self, names: Iterable[str]) -> Submit:
        """Return the message by which a worker gets these requests."""
        requests = [self.request(name) for name in names]
        return Submit(requests=requests, priority=self.work.priority, versions=self.versions)

    def finish(self, name: str, output: Output) -> None:
        del self.worker[name]
        self.outputs[name] = output
        self.finished.append(name)

    def extend(self, delta: OutputDelta) -> None:
        self.outputs[delta.id] = delta.applied_to(self.outputs.get(delta.id))

    def take(self) -> list[Completion]:
        """Return the answers that have ended since the last time."""
        names, self.finished, self.num_seen = self.finished, deque(), 0
        return self._completions(names)

    def unseen(self) -> list[Completion]:
        """Return the answers that have ended since the last time, and leave them to be taken."""
        names = list(islice(self.finished, self.num_seen, None))
        self.num_seen += len(names)
        return self._completions(names)

    def _completions(self, names: Iterable[str]) -> list[Completion]:
        return [Completion(request=self.work.requests[self.index[name]], output=self.outputs[name]) for name in names]

    def report(self, completed: Iterable[Completion], num_tokens: Mapping[str, int]) -> ProgressReport:
        """Return what the coordinator is told: what has ended, and the tokens of what has not, as far as known."""
        return ProgressReport(
            finished=tuple(self.index[each.request.id] for each in completed),
            tokens={self.index[name]: num_tokens[name] for name in self.worker if name in num_tokens},
        )

    def num_tokens(self) -> dict[str, int]:
        """Return the tokens of each answer that goes on, as far as they are told."""
        return {name: len(self.outputs[name]) for name in self.worker if name in self.outputs}

    def state(self) -> RunAheadState | None:
        """Return what a run that ends here goes on from; None for an evaluation."""
        if self.work.number is None:
            return None
        return RunAheadState(step=self.work.number, asked=self.work.asked, plan=self.plan, outputs=dict(self.outputs))
