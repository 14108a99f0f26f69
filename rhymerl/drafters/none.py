"""No drafting: plain decoding, the baseline that every drafter is measured against."""

from __future__ import annotations

import numpy as np

from rhymerl.drafters.base import Drafter
from rhymerl.drafts import Draft
from rhymerl.types import IntArray, RolloutRequest

_NOTHING = np.empty(0, dtype=np.int32)


class NoDrafter(Drafter):
    """Guesses nothing."""

    def propose(self, request: RolloutRequest, context: IntArray, budget: int) -> Draft:
        return Draft(token_ids=_NOTHING, parents=_NOTHING)
