"""The interface of commands of the command line."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from rhymerl.cli.interrupt import Interrupt
from rhymerl.distributed.first import is_first_rank
from rhymerl.errors import UsageError
from rhymerl.progress import SILENT, ProgressBar, ShownProgressBar

if TYPE_CHECKING:
    from omegaconf import DictConfig

Result = Mapping[str, Any]
Settings: TypeAlias = "DictConfig"  # as text: OmegaConf is imported where settings are composed


def add_json_option(parser: ArgumentParser) -> None:
    """Let a command print its result for programs."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")


class Subcommand(ABC):
    """One word after `rhymerl`. The first line of a subclass's docstring is its help."""

    name: ClassVar[str]
    word: ClassVar[str | None] = None  # the argument that may stand anywhere among the overrides

    @property
    def help(self) -> str:
        return (type(self).__doc__ or "").splitlines()[0]

    @abstractmethod
    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> Result | None:
        """Do it; what is returned is printed for `--json`. Imports what is heavy itself."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Options beyond the common ones."""

    def claim(self, arguments: Namespace, words: Sequence[str]) -> list[str]:
        """Take from the words that argparse does not know what is no override, such as `word`; returns the others."""
        if self.word is None:
            return list(words)
        given = [each for each in (getattr(arguments, self.word), *words) if each is not None]
        claimed = next((each for each in given if _is_no_override(each)), None)
        setattr(arguments, self.word, claimed)
        return [each for each in given if each is not claimed]


def _is_no_override(word: str) -> bool:
    return not word.startswith(("-", "~")) and ("=" not in word or Path(word).is_dir())


class ConfiguredCommand(Subcommand):
    """A command on a config: `--config NAME|PATH`, `--print-config`, `--json` and `key=value`."""

    usage: ClassVar[str] = "--config NAME|PATH [key=value ...]"  # what has to be given, and what may be
    needs: ClassVar[str] = "--config"
    config_help: ClassVar[str] = "a packaged config or your own .yaml"
    default_config: ClassVar[str | None] = None
    takes: ClassVar[str | None] = None  # the command whose configs it takes, if not its own
    is_told_early: ClassVar[bool] = False  # with a line on stdout before libraries are loaded that take seconds

    def add_arguments(self, parser: ArgumentParser) -> None:
        lines = [f"rhymerl {self.name} {line} [--print-config] [--json] [--debug]" for line in self.usage.splitlines()]
        parser.usage = "\n       ".join(lines)
        parser.add_argument(
            "--config",
            metavar="NAME|PATH",
            default=self.default_config,
            help=self.config_help,
        )
        parser.add_argument("--print-config", action="store_true", help="show every setting, and do nothing")
        add_json_option(parser)

    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> Result | None:
        from omegaconf import OmegaConf

        from rhymerl.cli.kinds import check_kind, names_of
        from rhymerl.config import recorded

        if arguments.config is None:
            known = ", ".join(names_of(self.kind(arguments)))
            raise UsageError(f"rhymerl {self.name} needs {self.needs}: a .yaml file, or one of {known}")
        check_kind(arguments.config, self.kind(arguments))
        if not arguments.print_config:
            self.check_early(arguments.config, overrides)
        if self.is_told_early and not arguments.print_config and "torch" not in sys.modules and is_first_rank():
            print(f"rhymerl {self.name}, {arguments.config}: loading torch and Lightning", flush=True)
        with self.progress().during(f"rhymerl {self.name}: reading the settings"):
            config = self.compose(arguments, overrides)
        for key, value in self.settings(arguments).items():
            config[key] = value
        if arguments.print_config:
            print(OmegaConf.to_yaml(config), end="")
            return recorded(config)
        return self.run_config(config, arguments, interrupt)

    def check_early(self, config: str, overrides: Sequence[str]) -> None:
        """Raise what can be told before libraries are loaded that take seconds."""

    def compose(self, arguments: Namespace, overrides: Sequence[str]) -> Settings:
        from rhymerl.config import compose

        return compose(arguments.config, overrides)

    def kind(self, arguments: Namespace) -> str:
        """Return the command whose configs this one takes."""
        return self.takes or self.name

    def progress(self) -> ProgressBar:
        """Return the progress display of the command, on the first rank."""
        return ShownProgressBar() if is_first_rank() else SILENT

    def settings(self, arguments: Namespace) -> Mapping[str, Any]:
        """Return the settings that are words of the command line rather than overrides."""
        return {}

    @abstractmethod
    def run_config(self, config: Settings, arguments: Namespace, interrupt: Interrupt) -> Result | None:
        """Do it with checked settings and with the options of this command."""
