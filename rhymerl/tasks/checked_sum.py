"""Checked sums: running sums of several turns, in which the policy is asked again where it was wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from rhymerl.tasks.base import Row
from rhymerl.tasks.running_sum import RunningSum


@dataclass(kw_only=True, eq=False)
class CheckedSum(RunningSum):
    """A running sum whose steps are checked.

    `37+85=122;122+12=133;#133` gets the reply `?122+12=`, and the policy goes on there. The reward is 1 for a sum that
    is right at once, and half of that for each time that the policy was asked again.
    """

    reward = "rhymerl.tasks.checked_sum.checked_sum_reward"
    is_pure = True  # see `rhymerl.environments.Environment`

    def reply(self, row: Row, turns: Sequence[Any]) -> str | None:
        steps, total = self.steps(self.numbers_of(row), 0.0, random.Random(0))
        answer, right = f"{steps};#{total}", ""
        for turn in turns:
            said = right + turn.text
            if said == answer:
                return None
            same = answer[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer, said, strict=False)))]
            right = same[: max(same.rfind("="), same.rfind("#")) + 1]
        return f"?{right.rpartition(';')[2]}"


def checked_sum_reward(completion: str, *, finish_reason: str, turns: Sequence[object]) -> float:
    """Return 1 for a sum that was right in the first turn, 0.5 in the second, and so on; 0 for one that never was."""
    return float(0.5 ** (len(turns) - 1)) if finish_reason == "stop" else 0.0
