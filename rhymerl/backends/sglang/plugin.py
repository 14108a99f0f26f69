"""What SGLang loads in each of its processes (entry point group `sglang.srt.plugins`)."""

from __future__ import annotations

import os

VARIABLE = "RHYMERL_SGLANG"  # the path of the engine's settings (settings.py)


def register() -> None:
    """Bring in the drafting worker and the keyed draw, where an engine was started for rhymerl; otherwise do nothing."""
    if not os.environ.get(VARIABLE):
        return
    from rhymerl.backends.sglang import sampler, worker

    sampler.install()
    worker.install()
