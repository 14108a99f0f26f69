"""Which process of several speaks to people and writes files."""

from __future__ import annotations

import os
import sys


def is_first_rank() -> bool:
    """Whether it is this one, also before the ranks have met; looked up without importing Lightning."""
    known = sys.modules.get("lightning.fabric.utilities.rank_zero")
    return known is None or getattr(known.rank_zero_only, "rank", 0) == 0


def is_first_of_node() -> bool:
    """Whether no other process of this machine has a lower rank; launchers number those of a machine from 0."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
