"""Long running sums: lists of very unequal length, and answers that begin again when in doubt."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rhymerl.errors import at_least, require
from rhymerl.tasks.base import Row
from rhymerl.tasks.running_sum import RunningSum


@dataclass(kw_only=True, eq=False)
class LongSum(RunningSum):
    """A running sum whose answers have a long tail of lengths, most of which comes from the prompt.

    The number of additions is log-normal, at most `difficulty` (1 to 40), with median `typical` and deviation `spread`
    of its logarithm. With probability `doubt` a demonstration repeats the whole sum, at most until it has done so
    `rounds` times, so that answers to one prompt differ in length too: `37+85=122;?37+85=122;#122`. `error_rate` is as
    in RunningSum, and 0 after the first round, so that doubt pays.
    """

    most_additions = 40

    difficulty: int = 18
    typical: float = 6.0
    spread: float = 0.7
    doubt: float = 0.35
    rounds: int = at_least(1, 2)
    max_number: int = at_least(1, 20)
    error_rate: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        additions = f"1 to difficulty={self.difficulty} additions"
        require(1 <= self.typical <= self.difficulty, "typical", self.typical, additions)
        require(0 <= self.spread < float("inf"), "spread", self.spread, "at least 0")
        require(0 <= self.doubt < 1, "doubt", self.doubt, "a probability in [0, 1)")

    def problem(self, random_source: random.Random) -> Row:
        additions = round(self.typical * random_source.lognormvariate(0.0, self.spread))
        return self.problem_of(min(max(additions, 1), self.difficulty) + 1, random_source)

    def demonstration(self, row: Row, random_source: random.Random) -> str:
        numbers = self.numbers_of(row)
        steps, total = self.steps(numbers, self.error_rate, random_source)
        for _ in range(self.rounds - 1):
            if random_source.random() >= self.doubt:
                break
            again, total = self.steps(numbers, 0.0, random_source)
            steps = f"{steps};?{again}"
        return f"{steps};#{total}"
