"""The choice of the process among several that speaks to people and writes files."""

from __future__ import annotations

import os
import sys

_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")  # where Lightning looks, in its order


def is_first_rank() -> bool:
    """Return whether it is this one, also before there is a process group; looked up without importing Lightning."""
    known = sys.modules.get("lightning.fabric.utilities.rank_zero")
    if known is not None:
        return getattr(known.rank_zero_only, "rank", 0) == 0
    return next((os.environ[name] for name in _VARIABLES if name in os.environ), "0") == "0"
