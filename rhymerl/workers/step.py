"""The requests of a step, as they are answered together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rhymerl.backends.spans import EVALUATION
from rhymerl.types import RolloutRequest, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequests:
    """The requests that are answered together, in canonical order, and the next step's, which workers may begin."""

    step: int | str
    requests: Sequence[RolloutRequest]
    following: Sequence[RolloutRequest] | None = None
    split: Split = "train"
    episodes: str = ""  # what their turns follow from: environment and limits; empty where answers are of one turn

    @property
    def number(self) -> int | None:
        """Return the step of training; None for an evaluation, in which nothing moves."""
        return self.step if isinstance(self.step, int) and self.split == "train" else None

    @property
    def priority(self) -> int:
        """Return the priority, of which the lowest goes first: an evaluation before all steps."""
        return EVALUATION if self.number is None else self.number

    def next_step(self) -> StepRequests:
        """Return the requests of the next step as a step of their own."""
        assert isinstance(self.step, int) and self.following is not None
        return StepRequests(step=self.step + 1, requests=self.following, episodes=self.episodes)
