"""Addition: two numbers, asked for in words, for a model that has been trained on language."""

from __future__ import annotations

import random

from rhymerl.tasks.base import Row, Split, Task


class Addition(Task):
    """`What is 47 + 85?` as a chat message, with numbers of up to `max_number`. The last number of the answer counts.

    The smaller number comes first, so a held-out problem is no training problem the other way round. `instruction` is the
    system message; None leaves it to the chat template.
    """

    reward = "rhymerl.rewards.numeric_match"
    tenths: tuple[Split, ...] = ("validation",) * 3 + ("train",) * 7  # small numbers have few sums

    def __init__(
        self,
        *,
        max_number: int = 99,
        instruction: str | None = None,
        seed: int = 0,
        train_size: int = 512,
        validation_size: int = 512,
    ) -> None:
        super().__init__(seed=seed, train_size=train_size, validation_size=validation_size)
        if max_number < 1:
            raise ValueError(f"max_number={max_number}: expected at least 1")
        self.max_number = max_number
        self.instruction = instruction

    def problem(self, random_source: random.Random) -> Row:
        one, other = sorted(random_source.randint(1, self.max_number) for _ in range(2))
        question = {"role": "user", "content": f"What is {one} + {other}? Answer with the number only."}
        system = [{"role": "system", "content": self.instruction}] if self.instruction is not None else []
        return {"prompt": [*system, question], "answer": str(one + other)}
