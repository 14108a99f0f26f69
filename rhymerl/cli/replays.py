"""Commands that judge parts without a model."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from rhymerl.cli.base import ConfiguredCommand, Result, Settings
from rhymerl.cli.interrupt import Interrupt


class ReplayCommand(ConfiguredCommand):
    """judge a drafter on recorded rollouts (TRACE), without a model"""

    name = "replay"
    usage = "TRACE [key=value ...] [--config NAME|PATH]"
    default_config = "replay"

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("trace", metavar="TRACE", help="recorded rollouts, .jsonl or .jsonl.gz")

    def settings(self, arguments: Namespace) -> dict[str, Any]:
        return {"trace": arguments.trace}

    def run_config(self, config: Settings, interrupt: Interrupt) -> Result:
        progress = self.progress()
        with progress.during("rhymerl replay: loading"):
            from rhymerl.runs.replay import replay_trace
            from rhymerl.runs.replay_report import report

        result = replay_trace(config, progress=progress)
        report(result)
        return result


class SimulateCommand(ConfiguredCommand):
    """judge a scheduler on synthetic or recorded lengths, for any number of workers"""

    name = "simulate"
    usage = "[key=value ...] [--config NAME|PATH]"
    default_config = "simulate"

    def run_config(self, config: Settings, interrupt: Interrupt) -> Result:
        progress = self.progress()
        with progress.during("rhymerl simulate: loading"):
            from rhymerl.simulation import comparison, sizing

        if config.gpus is not None:
            result = sizing.size(config, progress=progress)
            sizing.report(result)
            return result
        result = comparison.compare(config, progress=progress)
        comparison.report(result)
        return result
