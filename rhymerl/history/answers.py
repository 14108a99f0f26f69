"""From the rewards of a group to what the history keeps of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rhymerl.types import FloatArray


def group_advantages(rewards: Sequence[float]) -> FloatArray:
    """How much better than its group each answer was, [G], in standard deviations; all 0 where all are alike.

    The history's own measure, whatever the algorithm's: it only tilts which earlier answer a draft follows.
    """
    values = np.asarray(rewards, np.float64)
    spread = values.std()
    return (values - values.mean()) / spread if spread > 0 else np.zeros(len(values))
