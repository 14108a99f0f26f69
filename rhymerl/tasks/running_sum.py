"""Running sums: add a list of numbers step by step, then repeat the total after a '#'."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rhymerl.errors import at_least, require
from rhymerl.tasks.base import Row, Task

CHARACTERS = "0123456789+=;#? \n"


@dataclass(kw_only=True, eq=False)
class RunningSum(Task):
    """`37+85+12=?` is answered by `37+85=122;122+12=134;#134`.

    `difficulty` is the largest number of additions (1 to 15): answers grow with it, by up to 12 characters an addition.
    `error_rate` is the share of wrong additions planted in demonstrations: a policy that imitates them is
    right far more often at a low temperature than at 1, which leaves reinforcement learning a skill to sharpen.
    `prefix` stands before the sum: many pretrained models hardly read the first token of a sequence.
    """

    reward = "rhymerl.tasks.running_sum.running_sum_reward"
    most_additions = 15

    difficulty: int = 7
    max_number: int = at_least(1, 99)
    error_rate: float = 0.2
    prefix: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        additions = f"1 to {self.most_additions} additions"
        require(1 <= self.difficulty <= self.most_additions, "difficulty", self.difficulty, additions)
        require(0 <= self.error_rate < 1, "error_rate", self.error_rate, "a share in [0, 1)")

    def problem(self, random_source: random.Random) -> Row:
        return self.problem_of(random_source.randint(2, self.difficulty + 1), random_source)

    def problem_of(self, count: int, random_source: random.Random) -> Row:
        """Return the problem of adding so many numbers."""
        numbers = [random_source.randint(1, self.max_number) for _ in range(count)]
        return {"prompt": f"{self.prefix}{'+'.join(map(str, numbers))}=?\n", "answer": str(sum(numbers))}

    def demonstration(self, row: Row, random_source: random.Random) -> str:
        steps, total = self.steps(self.numbers_of(row), self.error_rate, random_source)
        return f"{steps};#{total}"

    def numbers_of(self, row: Row) -> list[int]:
        """Return the numbers that a problem adds."""
        text = row["prompt"].removeprefix(self.prefix).removesuffix("=?\n")
        return [int(number) for number in text.split("+")]

    @staticmethod
    def steps(numbers: Sequence[int], error_rate: float, random_source: random.Random) -> tuple[str, int]:
        """Return the additions in order, some of them wrong, and their sum."""
        total, steps = numbers[0], []
        for number in numbers[1:]:
            result = total + number
            if random_source.random() < error_rate:
                result = _slip(result, random_source)
            steps.append(f"{total}+{number}={result}")
            total = result
        return ";".join(steps), total


def _slip(number: int, random_source: random.Random) -> int:
    """Return the same number with one digit changed; the leading digit stays above zero."""
    digits = list(str(number))
    index = random_source.randrange(len(digits))
    lowest = 1 if index == 0 and len(digits) > 1 else 0
    choices = [digit for digit in "0123456789"[lowest:] if digit != digits[index]]
    digits[index] = random_source.choice(choices)
    return int("".join(digits))


def running_sum_reward(completion: str, *, answer: str) -> float:
    """Return 1.0 when the text after the last '#' is the exact total, else 0.0."""
    _, mark, total = completion.rpartition("#")
    return float(bool(mark) and total.strip() == answer)
