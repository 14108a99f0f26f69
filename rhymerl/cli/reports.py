"""Commands that show runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from rhymerl.cli.base import Result, Subcommand
from rhymerl.cli.interrupt import Interrupt
from rhymerl.errors import UsageError
from rhymerl.progress import ShownProgressBar

_SETTINGS = ("out", "pictures")


class ReportCommand(Subcommand):
    """show runs (RUN ...) on one page: out=FILE.html, pictures=FOLDER for its charts as PNG"""

    name = "report"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.usage = "rhymerl report RUN [RUN ...] [out=FILE.html] [pictures=FOLDER] [--json] [--debug]"
        parser.add_argument("runs", metavar="RUN", nargs="*", help="the directories of runs")
        parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")

    def claim(self, arguments: Namespace, words: Sequence[str]) -> list[str]:
        """RUNs and settings may stand in any order."""
        named = {f"{name}=" for name in _SETTINGS}
        given = [*arguments.runs, *words]
        arguments.runs = [word for word in given if not word.startswith((*named, "-"))]
        return [word for word in given if word not in arguments.runs]

    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> Result:
        from rhymerl.report.page import REPORT, write_report

        if not arguments.runs:
            raise UsageError("rhymerl report needs RUN: the directory of a run, or several")
        settings = dict(word.split("=", 1) for word in overrides)
        default = Path(arguments.runs[0], REPORT) if len(arguments.runs) == 1 else Path(REPORT)
        out = Path(settings.get("out") or default)
        folder = settings.get("pictures")
        if folder:
            from rhymerl.report.pictures import check_matplotlib, draw_pictures

            check_matplotlib()
        runs = write_report(arguments.runs, out, progress=ShownProgressBar())
        print(f"The report is in {out}")
        pictures = draw_pictures(runs, Path(folder)) if folder else []
        if folder:
            print(f"Its charts are in {folder}: {len(pictures)} pictures")
        return {"report": str(out), "pictures": [str(path) for path in pictures]}
