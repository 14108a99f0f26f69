"""Commands that measure."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from rhymerl.cli.base import ConfiguredCommand, Result, Settings
from rhymerl.cli.interrupt import Interrupt


class BenchCommand(ConfiguredCommand):
    """measure rollout speed by drafter (rollout), drafting alone (drafter) or the cost of passes (costs)"""

    name = "bench"
    usage = "rollout|drafter|costs [key=value ...] [--config NAME|PATH]"

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("what", choices=("rollout", "drafter", "costs"), help="what is measured")

    def kind(self, arguments: Namespace) -> str:
        return f"bench {arguments.what}"

    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> Result | None:
        arguments.config = arguments.config or f"bench_{arguments.what}"
        return super().run(arguments, overrides, interrupt)

    def run_config(self, config: Settings, arguments: Namespace, interrupt: Interrupt) -> Result:
        """Prints a table."""
        progress = self.progress()
        loading = progress.during(f"rhymerl bench {arguments.what}: loading")
        if arguments.what == "drafter":
            with loading:
                from rhymerl.bench import drafter

            result = drafter.DrafterBench(config).run(progress)
            drafter.report(result)
            return result
        if arguments.what == "costs":
            with loading:
                from rhymerl.bench.passes import CostsBench

            return CostsBench(config).run(progress)
        with loading:
            from rhymerl.bench import rollout

        result = rollout.RolloutBench(config).run(progress)
        rollout.report(result)
        return result
