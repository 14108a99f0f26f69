"""Prompts and answers for the tests of the history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rhymerl.history import Answer
from rhymerl.testing import make_answer
from rhymerl.types import Prompt


def prompt(key: str, token_ids: Sequence[int] = (7, 8)) -> Prompt:
    return Prompt(id=key, key=key, token_ids=np.array(token_ids, np.int32), text="")


def answer(epoch: int = 0, sample: int = 0, token_ids: Sequence[int] = (1, 2, 3), **changed: Any) -> Answer:
    return make_answer(token_ids, epoch=epoch, sample=sample, **{"reward": 0.5, "advantage": -1.0, **changed})
