"""The command that looks at the machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict

from rhymerl.cli.base import Result, Subcommand
from rhymerl.cli.interrupt import Interrupt
from rhymerl.cli.settings import print_facts
from rhymerl.errors import UsageError
from rhymerl.progress import ShownProgressBar


class DoctorCommand(Subcommand):
    """say what this machine has, what a run would use of it, what is wrong with it, and of a model what it would do"""

    name = "doctor"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.usage = "rhymerl doctor [model.path=PATH] [--json]"
        parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")

    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> Result:
        for other in (each for each in overrides if not each.startswith("model.")):
            raise UsageError(f"rhymerl doctor takes settings of a model alone (model.path=PATH), not {other!r}")
        with ShownProgressBar().during("rhymerl doctor: loading torch and Lightning"):
            from rhymerl.runs import examined_model
            from rhymerl.runs.doctor import examine, lines_of

            machine = examine()
            model = examined_model.examine_model(overrides) if overrides else None
        print_facts(lines_of(machine))
        if model is not None:
            print()
            print_facts(examined_model.lines_of(model))
        if not machine.problems:
            print("\nNothing is wrong.")
        return {**asdict(machine), "model": asdict(model) if model is not None else None}
