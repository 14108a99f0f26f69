"""Commands that show runs."""

from __future__ import annotations

from abc import abstractmethod
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rhymerl.cli.base import Result, Subcommand, add_json_option
from rhymerl.cli.interrupt import Interrupt
from rhymerl.errors import ConfigError, UsageError
from rhymerl.progress import ShownProgressBar


class ShowCommand(Subcommand):
    """A command on the directories of runs, RUN ..., with settings of its own."""

    usage: ClassVar[str]  # behind the runs
    settings: ClassVar[Sequence[str]]

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.usage = f"rhymerl {self.name} RUN [RUN ...] {self.usage} [--debug]"
        parser.add_argument("runs", metavar="RUN", nargs="*", help="the directories of runs")

    def claim(self, arguments: Namespace, words: Sequence[str]) -> list[str]:
        """RUNs and settings may stand in any order."""
        named = {f"{name}=" for name in self.settings}
        given = [*arguments.runs, *words]
        arguments.runs = [word for word in given if not word.startswith((*named, "-"))]
        return [word for word in given if word not in arguments.runs]

    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> Result | None:
        if not arguments.runs:
            raise UsageError(f"rhymerl {self.name} needs RUN: the directory of a run, or several")
        return self.show(arguments.runs, dict(word.split("=", 1) for word in overrides))

    @abstractmethod
    def show(self, runs: Sequence[str], settings: Mapping[str, str]) -> Result | None:
        """Do it for these directories, at least one."""


class ReportCommand(ShowCommand):
    """show runs (RUN ...) on one page: out=FILE.html, pictures=FOLDER for its charts as PNG"""

    name = "report"
    usage = "[out=FILE.html] [pictures=FOLDER] [--json]"
    settings = ("out", "pictures")

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        add_json_option(parser)

    def show(self, runs: Sequence[str], settings: Mapping[str, str]) -> Result:
        from rhymerl.report.page import REPORT, write_report

        default = Path(runs[0], REPORT) if len(runs) == 1 else Path(REPORT)
        out = Path(settings.get("out") or default)
        folder = settings.get("pictures")
        if folder:
            from rhymerl.report.pictures import check_matplotlib, draw_pictures

            check_matplotlib()
        found = write_report(runs, out, progress=ShownProgressBar())
        print(f"The report is in {out}")
        pictures = draw_pictures(found, Path(folder)) if folder else []
        if folder:
            print(f"Its charts are in {folder}: {len(pictures)} pictures")
        return {"report": str(out), "pictures": [str(path) for path in pictures]}


class WatchCommand(ShowCommand):
    """show runs (RUN ...) while they go on, on one page that is kept up to date, to this machine alone: port=NUMBER"""

    name = "watch"
    usage = "[port=NUMBER]"
    settings = ("port",)

    def show(self, runs: Sequence[str], settings: Mapping[str, str]) -> None:
        from rhymerl.report.watch import WatchServer

        port = settings.get("port", "0")
        if not port.isdecimal() or int(port) >= 2**16:
            raise ConfigError(f"port={port}: expected 0 to 65535; leave it out for a free one")
        with WatchServer(runs, port=int(port)) as server:
            print(f"{', '.join(runs)}: at {server.url} until Ctrl-C", flush=True)
            server.serve_forever()
