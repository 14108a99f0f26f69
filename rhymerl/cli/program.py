"""The program itself: reads the words, runs the command, turns errors into one line and an exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout

from rhymerl.cli.base import ConfiguredCommand, Subcommand
from rhymerl.cli.benches import BenchCommand
from rhymerl.cli.hints import did_you_mean_command, did_you_mean_config, did_you_mean_option
from rhymerl.cli.interrupt import Interrupt
from rhymerl.cli.models import ExportCommand, SGLangArgsCommand, WarmstartCommand
from rhymerl.cli.replays import ReplayCommand, SimulateCommand
from rhymerl.cli.reports import ReportCommand, WatchCommand
from rhymerl.cli.runs import EvaluateCommand, FitCommand, ForkCommand, PlanCommand, ResumeCommand, RolloutCommand
from rhymerl.cli.settings import ConfigsCommand, DoctorCommand, ExplainCommand
from rhymerl.distributed.first import is_first_rank
from rhymerl.distributed.parent import as_launcher, end_with_parent
from rhymerl.errors import RhymeError, UsageError
from rhymerl.runs.quiet import quiet

COMMANDS: tuple[Subcommand, ...] = (
    FitCommand(),
    ResumeCommand(),
    ForkCommand(),
    EvaluateCommand(),
    PlanCommand(),
    RolloutCommand(),
    ReplayCommand(),
    SimulateCommand(),
    BenchCommand(),
    ReportCommand(),
    WatchCommand(),
    WarmstartCommand(),
    ExportCommand(),
    SGLangArgsCommand(),
    ConfigsCommand(),
    ExplainCommand(),
    DoctorCommand(),
)

OK, FAILED, BAD_USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None, *, commands: Sequence[Subcommand] = COMMANDS) -> int:
    """Run one command and return its exit code.

    0 is success, 1 failure, 2 bad usage, 128 + N the signal N that stopped it (Ctrl-C: 130).
    """
    end_with_parent()
    # Threads that spin long while they wait slow a busy machine down by tens of times, and those that sleep at once are
    # slow to wake on a quiet one; torch's OpenMP reads this when it is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    parser = make_parser(commands)
    words = sys.argv[1:] if argv is None else argv
    names = [command.name for command in commands]
    first = next((word for word in words if not word.startswith("-")), None)
    if first is not None and first not in names:
        parser.error(f"invalid choice: {first!r} (choose from {', '.join(names)}){did_you_mean_command(first, names)}")
    arguments, overrides = parser.parse_known_args(words)
    if arguments.name is not None:
        overrides = arguments.command.claim(arguments, overrides)
    for index, word in enumerate(overrides):
        if word.startswith("-") or ("=" not in word and not word.startswith("~")):
            hint = _hint(arguments, word, overrides[index + 1 :])
            parser.error(f"{word!r}: expected an option of rhymerl {arguments.name}, or an override key=value{hint}")
    with as_launcher(), Interrupt() as interrupt, quiet():
        code = _run(arguments, overrides, interrupt)
    if interrupt.requested:
        # To Lightning's launcher any other code is a failure, for which it kills rank 0, which still writes its files.
        return OK if code == OK and not is_first_rank() else interrupt.exit_code
    return code


def make_parser(commands: Sequence[Subcommand] = COMMANDS) -> ArgumentParser:
    """Return a parser with one subparser a command; words that it does not know are overrides."""
    parser = ArgumentParser(
        prog="rhymerl",
        description="Reinforcement-learning post-training of language models, with rollouts that learn from their history.",
        epilog="rhymerl COMMAND --help says more. Overrides are key=value, as in drafter=none trainer.max_steps=20.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="show the version")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="name", title="commands")
    for command in commands:
        subparser = subparsers.add_parser(command.name, allow_abbrev=False, help=command.help, description=command.help)
        command.add_arguments(subparser)
        subparser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        subparser.set_defaults(command=command)
    return parser


def _hint(arguments: Namespace, word: str, following: Sequence[str]) -> str:
    command = arguments.command
    if not isinstance(command, ConfiguredCommand):
        return ""
    if not word.startswith("-"):
        return did_you_mean_config(word, command.kind(arguments))
    parser = ArgumentParser(allow_abbrev=False)
    command.add_arguments(parser)
    return did_you_mean_option(word, following, parser)


def _run(arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> int:
    try:
        return _dispatch(arguments, overrides, interrupt)
    except KeyboardInterrupt as error:
        code = _interrupted(interrupt)
        _say_notes(error)
        return code
    except SystemExit as error:  # what Lightning makes of a second Ctrl-C
        _say_notes(error)
        return error.code if isinstance(error.code, int) else FAILED
    except Exception as error:  # noqa: BLE001 - the last place that can turn an error into an exit code
        if getattr(arguments, "debug", False):
            traceback.print_exc()
        if interrupt.was_raised:  # and went astray: this is what a half-imported module then stumbles over
            return _interrupted(interrupt)
        print(f"error: {_in_one_line(error)}", file=sys.stderr)
        _say_notes(error)
        return BAD_USAGE if isinstance(error, UsageError) or _is_refused_flag(error) else FAILED


def _interrupted(interrupt: Interrupt) -> int:
    interrupt.requested = True
    print("interrupted", file=sys.stderr)
    return interrupt.exit_code


def _dispatch(arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> int:
    if arguments.version:
        from rhymerl import __version__

        print(f"rhymerl {__version__}")
        return OK
    if arguments.name is None:
        raise UsageError(f"expected a command: {', '.join(each.name for each in COMMANDS)}; rhymerl --help says more")
    if not getattr(arguments, "json", False):
        arguments.command.run(arguments, overrides, interrupt)
        return OK
    with redirect_stdout(sys.stderr):
        result = arguments.command.run(arguments, overrides, interrupt)
    if result is not None:
        print(json.dumps(dict(result), default=str))
    return OK


def _is_refused_flag(error: Exception) -> bool:
    """Lightning's way to refuse a flag of its Trainer; looked up without importing it."""
    exceptions = sys.modules.get("lightning.fabric.utilities.exceptions")
    return exceptions is not None and isinstance(error, exceptions.MisconfigurationException)


def _in_one_line(error: Exception) -> str:
    message = " ".join(str(error).split())
    if isinstance(error, RhymeError) or _is_refused_flag(error):
        return message
    return f"{type(error).__name__}: {message} (--debug shows where)"


def _say_notes(error: BaseException) -> None:
    """Print the notes that our own code has added to it: how to go on."""
    for note in getattr(error, "__notes__", ()):
        print(note, file=sys.stderr)
