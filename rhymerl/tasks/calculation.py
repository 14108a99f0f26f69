"""Calculations: sums that are too hard to do in the head, for a policy that may call a calculator."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rhymerl.errors import at_least
from rhymerl.tasks.base import Row, Task

_INSTRUCTION = "Use the calculator."


@dataclass(kw_only=True, eq=False)
class Calculation(Task):
    """`What is 482 + 773 + 96?` as chat messages: 2 to `max_terms` numbers of up to `max_number`.

    The last number of the policy's last turn counts. A demonstration calls the tool `calculator` in Hermes' way and
    repeats the result.
    """

    reward = "rhymerl.tasks.calculation.calculation_reward"

    max_terms: int = at_least(2, 3)
    max_number: int = at_least(1, 999)

    def problem(self, random_source: random.Random) -> Row:
        count = random_source.randint(2, self.max_terms)
        numbers = [random_source.randint(1, self.max_number) for _ in range(count)]
        terms = " + ".join(map(str, numbers))
        system, question = {"role": "system", "content": _INSTRUCTION}, {"role": "user", "content": f"What is {terms}?"}
        return {"prompt": [system, question], "terms": terms, "answer": str(sum(numbers))}

    def demonstration(self, row: Row, random_source: random.Random) -> list[dict[str, str]]:
        call = {"name": "calculator", "arguments": {"expression": row["terms"]}}
        return [
            {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
            {"role": "tool", "content": row["answer"]},
            {"role": "assistant", "content": f"It is {row['answer']}."},
        ]


def calculation_reward(completion: str, *, turns: Sequence[Mapping[str, str]], answer: str) -> float:
    """Return 1.0 when the last number of the policy's last turn is the answer, else 0.0."""
    numbers = re.findall(r"\d+", turns[-1]["text"])
    return float(bool(numbers) and numbers[-1] == answer)
