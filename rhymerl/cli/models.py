"""Commands that write models, and what serves them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from rhymerl.cli.base import ConfiguredCommand, Result, Settings, Subcommand
from rhymerl.cli.interrupt import Interrupt
from rhymerl.errors import UsageError
from rhymerl.progress import ShownProgressBar


class WarmstartCommand(ConfiguredCommand):
    """train a small policy on a task's demonstrations (out=DIR); an interrupted one goes on where it was"""

    name = "warmstart"
    usage = "[key=value ...] [--config NAME|PATH]"
    is_told_early = True
    default_config = "warmstart_running_sum"

    def run_config(self, config: Settings, arguments: Namespace, interrupt: Interrupt) -> Result | None:
        from rhymerl.callbacks import StopOnRequest
        from rhymerl.config import instantiate, resolved

        settings = resolved(config)["warmstart"]
        callbacks = [*(settings.get("callbacks") or []), StopOnRequest(interrupt)]
        out = instantiate({**settings, "callbacks": callbacks}, key="warmstart")
        if interrupt.requested:
            print(f"The state is in {out}: the same command goes on from there")
            return {"out": str(out)}
        print(f"The policy is in {out}: use it with model.path={out}")
        return {"out": str(out)}


class ExportCommand(Subcommand):
    """write the policy of a run as a Hugging Face directory"""

    name = "export"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", metavar="RUN", help="a run directory, or a checkpoint of one")
        parser.add_argument("out", metavar="OUT", help="the directory to write")

    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> None:
        if overrides:
            raise UsageError(f"rhymerl export takes RUN and OUT only, not {overrides[0]!r}")
        progress = ShownProgressBar()
        with progress.during("rhymerl export: loading torch"):
            from rhymerl.runs.export import export
        with progress.during("rhymerl export: writing the policy"):
            out = export(arguments.run, arguments.out)
        print(f"The policy is in {out}")


class SGLangArgsCommand(ConfiguredCommand):
    """print the command line of an SGLang server that drafts with ours (out=FOLDER for what it reads)"""

    name = "sglang-args"
    usage = "model.path=DIR out=FOLDER [key=value ...] [--config NAME|PATH]"
    default_config = "sglang_args"

    def run_config(self, config: Settings, arguments: Namespace, interrupt: Interrupt) -> Result | None:
        from rhymerl.backends.sglang.launch import launch_line, shell_line

        launch = launch_line(config)
        print(shell_line(launch))
        return launch
