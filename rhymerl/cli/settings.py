"""Commands that say what there is: configs, settings, and the machine."""

from __future__ import annotations

import re
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from rhymerl.cli.base import ConfiguredCommand, Result, Settings, Subcommand, add_json_option
from rhymerl.cli.interrupt import Interrupt
from rhymerl.errors import UsageError
from rhymerl.progress import ShownProgressBar

if TYPE_CHECKING:
    from rhymerl.config.explain import Explanation

_WIDEST = 100  # columns, for reading


class ConfigsCommand(Subcommand):
    """list the packaged configs and the options of each group, each in one line"""

    name = "configs"

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_json_option(parser)

    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> Result:
        from rhymerl.cli.kinds import kind_of
        from rhymerl.config.files import about, groups, locate, packaged_directory, packaged_names

        if overrides:
            raise UsageError(f"rhymerl configs takes no settings, not {overrides[0]!r}")
        configs: dict[str, dict[str, str]] = {}
        for name in packaged_names():
            configs.setdefault(str(kind_of(locate(name))), {})[name] = about(locate(name))
        packaged = packaged_directory()
        of_groups = {
            group: {name: about(packaged / group / f"{name}.yaml") for name in names}
            for group, names in groups().items()
        }
        for command, rows in sorted(configs.items(), key=lambda each: (each[0] != "fit", each[0])):
            _print_table(f"rhymerl {command} --config NAME", rows)
        for group, rows in of_groups.items():
            _print_table(f"{group}=NAME", rows)
        print("--print-config shows all settings of a config, rhymerl explain SETTING one.")
        return {"configs": configs, "groups": of_groups}


class ExplainCommand(ConfiguredCommand):
    """explain a setting (SETTING): its type, default, documentation, and where it is set"""

    name = "explain"
    word = "setting"
    usage = "SETTING [key=value ...] [--config NAME|PATH]"
    default_config = "base"

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("setting", metavar="SETTING", nargs="?", help="such as update.learning_rate, or a section")

    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> Result | None:
        if arguments.setting is None:
            raise UsageError("rhymerl explain needs SETTING, such as update.learning_rate or drafter")
        arguments.overrides = overrides
        return super().run(arguments, overrides, interrupt)

    def run_config(self, config: Settings, arguments: Namespace, interrupt: Interrupt) -> Result:
        from rhymerl.config.explain import explain

        found = explain(config, arguments.setting, arguments.config, arguments.overrides)
        _print_explanation(found)
        return asdict(found)


def _width() -> int:
    return min(get_terminal_size().columns, _WIDEST)


def _print_table(title: str, rows: Mapping[str, str]) -> None:
    print(title)
    column = max(map(len, rows)) + 4
    for name, words in rows.items():
        begin = f"  {name}".ljust(column)
        print(textwrap.fill(words, _width(), initial_indent=begin, subsequent_indent=" " * column) or begin.rstrip())
    print()


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names and descriptions, in two columns as wide as the terminal."""
    for name, words in facts:
        begin = f"{name:<12}"
        print(textwrap.fill(words, _width(), initial_indent=begin, subsequent_indent=" " * len(begin)))


def _print_explanation(found: Explanation) -> None:
    print_facts(_facts(found))
    if found.about:
        print("\n" + _wrapped(found.about))
    if found.settings:
        print()
        _print_table("settings", found.settings)


def _facts(found: Explanation) -> Iterator[tuple[str, str]]:
    from rhymerl.config.explain import in_yaml

    is_component = isinstance(found.value, Mapping) and "_target_" in found.value
    yield "setting", found.key
    if not found.settings or is_component:
        yield "value", in_yaml(found.value)
    if found.type is not None and not found.settings:
        yield "type", found.type
    if found.owner is not None and not found.settings and found.type is not None:
        yield "default", in_yaml(found.default)
    if found.options:
        yield "options", f"{', '.join(found.options)}, or a dotted class path such as my_module.MyClass"
    yield "set in", found.set_in
    if found.owner is not None:
        yield "class", found.owner
    if found.followed_by:
        yield "followed by", ", ".join(found.followed_by)
    if found.elsewhere:
        yield "elsewhere", ", ".join(found.elsewhere)


def _wrapped(text: str) -> str:
    """Paragraphs in the terminal's width; what is indented or a list stays as it is."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(
        each if re.search(r"^(\s|[-*|])", each, re.MULTILINE) else textwrap.fill(" ".join(each.split()), _width())
        for each in paragraphs
    )


class DoctorCommand(Subcommand):
    """say what this machine has, what a run would use of it, what is wrong with it, and of a model what it would do"""

    name = "doctor"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.usage = "rhymerl doctor [model.path=PATH] [--json]"
        add_json_option(parser)

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
