"""The command that estimates a run."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rhymerl.cli.base import ConfiguredCommand, Result, Settings
from rhymerl.cli.interrupt import Interrupt


class PlanCommand(ConfiguredCommand):
    """estimate what each rank of a training run would hold and send, from its settings and the model's config alone"""

    name = "plan"
    usage = "[key=value ...] [--config NAME|PATH] [--device-gib GIB]"
    default_config = "base"
    is_told_early = True

    def kind(self, arguments: Namespace) -> str:
        return "fit"

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--device-gib",
            type=float,
            metavar="GIB",
            help="the memory of a rank's device; by default that of the GPU here",
        )

    def run_with(self, config: Settings, arguments: Namespace, interrupt: Interrupt) -> Result | None:
        return self.run_config(config, interrupt, device_gib=arguments.device_gib)

    def run_config(self, config: Settings, interrupt: Interrupt, *, device_gib: float | None = None) -> Result | None:
        with self.progress().during("loading torch and Lightning"):
            from rhymerl.runs.plan import plan

        return plan(config, device_gib=device_gib)
