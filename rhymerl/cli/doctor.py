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
    """say what this machine has for a run, what a run would use of it, and what is wrong with it"""

    name = "doctor"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")

    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> Result:
        if overrides:
            raise UsageError(f"rhymerl doctor takes no settings, not {overrides[0]!r}")
        with ShownProgressBar().during("rhymerl doctor: loading torch and Lightning"):
            from rhymerl.runs.doctor import examine, lines_of

            machine = examine()
        print_facts(lines_of(machine))
        if not machine.problems:
            print("\nNothing is wrong.")
        return asdict(machine)
