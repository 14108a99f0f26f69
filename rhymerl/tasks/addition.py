"""Addition: two numbers, asked for in words, for a model that has been trained on language."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from rhymerl.errors import at_least
from rhymerl.tasks.base import Row, Task, TaskSplit


@dataclass(kw_only=True, eq=False)
class Addition(Task):
    """`What is 47 + 85?` as a chat message, with numbers of up to `max_number`. The last number of the answer counts.

    The smaller number comes first, so a held-out problem is no training problem the other way round. `instruction` is
    the system message; None leaves it to the chat template.
    """

    reward = "rhymerl.rewards.numeric_match"
    tenths: ClassVar[tuple[TaskSplit, ...]] = ("validation",) * 3 + ("train",) * 7  # small numbers have few sums

    max_number: int = at_least(1, 99)
    instruction: str | None = None

    def problem(self, random_source: random.Random) -> Row:
        one, other = sorted(random_source.randint(1, self.max_number) for _ in range(2))
        question = {"role": "user", "content": f"What is {one} + {other}? Answer with the number only."}
        system = [{"role": "system", "content": self.instruction}] if self.instruction is not None else []
        return {"prompt": [*system, question], "answer": str(one + other)}
