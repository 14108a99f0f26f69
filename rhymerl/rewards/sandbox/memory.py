"""The order in which processes go when the machine has no memory left."""

from __future__ import annotations


def volunteer() -> None:
    """Have the kernel kill this process and its children to come before others, where it has a say in that."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        return
