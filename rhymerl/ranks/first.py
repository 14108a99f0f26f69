"""Which process of several speaks to people and writes files."""

from __future__ import annotations

import sys


def is_first_rank() -> bool:
    """Whether it is this one, also before the ranks have met; looked up without importing Lightning."""
    known = sys.modules.get("lightning.fabric.utilities.rank_zero")
    return known is None or getattr(known.rank_zero_only, "rank", 0) == 0
