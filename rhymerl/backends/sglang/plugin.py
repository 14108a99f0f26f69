"""What SGLang loads in each of its processes (entry point group `sglang.srt.plugins`)."""

from __future__ import annotations

import os

VARIABLE = "RHYMERL_SGLANG"  # the path of the engine's settings (settings.py)


def register() -> None:
    """Bring in the drafting worker and the keyed draw, where an engine was started for rhymerl; otherwise do nothing.

    What became of it is written for the trainer: SGLang itself only logs that a plugin failed.
    """
    if not os.environ.get(VARIABLE):
        return
    from rhymerl.backends.sglang.settings import EngineSettings

    settings = EngineSettings.of_this_process()
    try:
        from rhymerl.backends.sglang import sampler

        sampler.install()
        from rhymerl.backends.sglang import worker

        worker.install()
    except (ImportError, AttributeError) as error:  # a version that lacks a name or has moved it
        settings.report(error)
        raise
    settings.report(None)
