"""Commands that answer prompts without training."""

from __future__ import annotations

from rhymerl.cli.base import ConfiguredCommand, Result, Settings
from rhymerl.cli.interrupt import Interrupt


class RolloutCommand(ConfiguredCommand):
    """answer prompts in several epochs (passes=3), with drafts from those before, and record the answers (out=FILE)"""

    name = "rollout"
    usage = "model.path=DIR data.prompts=FILE out=FILE [key=value ...] [--config NAME|PATH]"
    is_told_early = True
    default_config = "rollout"

    def run_config(self, config: Settings, interrupt: Interrupt) -> Result:
        progress = self.progress()
        with progress.during("rhymerl rollout: loading torch"):
            from rhymerl.runs.generate import generate, report

        result = generate(config, progress=progress)
        report(result)
        return result
