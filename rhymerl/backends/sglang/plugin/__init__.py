"""The plugin inside SGLang, which loads it in each of its processes (entry point group `sglang.srt.plugins`)."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from rhymerl.backends.sglang.plugin.names import VARIABLE


def register() -> None:
    """Install the drafting worker, the keyed draw and the history route in an engine started for rhymerl.

    Elsewhere do nothing. A version that cannot have our draw keeps its own. What was found is written for the trainer:
    SGLang itself only logs that a plugin failed.
    """
    if not os.environ.get(VARIABLE):
        return
    from rhymerl.backends.sglang.plugin.probe import Findings
    from rhymerl.backends.sglang.plugin.settings import EngineSettings

    settings = EngineSettings.of_this_process()
    found = Findings.of_this_version()
    if not found.drawing:
        from rhymerl.backends.sglang.plugin import sampler, verify

        sampler.install()
        verify.install()
    if not found.drafting:
        from rhymerl.backends.sglang.plugin import worker

        worker.install()
    settings.report(found)
    if settings.has_route and multiprocessing.parent_process() is None:  # here HTTP is served
        from rhymerl.backends.sglang.plugin import route

        route.install(Path(settings.folder))
