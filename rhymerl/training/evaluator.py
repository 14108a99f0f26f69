"""The evaluations of a run: the answers of the current one, and the metrics of the latest one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rhymerl.rewards import Reward
from rhymerl.rewards.failures import Failures
from rhymerl.rollout import Rollout
from rhymerl.training.evaluation import EvaluationSettings
from rhymerl.training.state import Learner, Snapshot
from rhymerl.types import Sample


class Evaluator:
    """Collects the answers between `begin` and `end`, which restores the state of `learners` from training."""

    def __init__(self, settings: EvaluationSettings, *learners: Learner) -> None:
        self.num_done = 0
        self.done_at: int | None = None  # rollout steps that had been trained on
        self.metrics: dict[str, float] = {}  # of the latest one
        self.answered: dict[str, list[Sample]] = {}  # in the one under way, by data set
        self._settings = settings
        self._learners = learners
        self._snapshot: Snapshot | None = None
        self._failures = Failures()  # of the rewards

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after so many rollout steps, and has not been run."""
        every = self._settings.every_n_steps
        return bool(every and step) and step % every == 0 and self.done_at != step

    def begin(self) -> None:
        """Answers come."""
        self._snapshot = Snapshot(*self._learners)
        self.answered, self._failures = {}, Failures()

    def add(self, name: str, result: Rollout) -> None:
        """Take answers to prompts of the data set `name`."""
        self.answered.setdefault(name, []).extend(result.samples)
        self._failures += result.failures

    def end(self, rewards: Sequence[Reward], *, step: int) -> dict[str, float]:
        """Return the metrics of all answers, if any. Raises RewardError if rewards have failed too often."""
        self._failures.check(rewards, "an evaluation")
        found: dict[str, float] = {}
        if self.answered:
            found = self.metrics = self._settings.metrics(self.answered, rewards)
            self.num_done, self.done_at = self.num_done + 1, step
        self.answered = {}
        if self._snapshot is not None:
            self._snapshot.restore()
        self._snapshot = None
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"num_done": self.num_done, "done_at": self.done_at, "metrics": dict(self.metrics)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_done, self.done_at, self.metrics = state["num_done"], state["done_at"], dict(state["metrics"])
