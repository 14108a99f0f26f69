"""Commands that judge parts without a model."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from rhymerl.cli.base import ConfiguredCommand, Result, Settings
from rhymerl.cli.interrupt import Interrupt
from rhymerl.errors import UsageError


class JudgingCommand(ConfiguredCommand):
    """A command that judges a part, such as a drafter, or compares those that `drafter=[a,b]` lists."""

    part: ClassVar[str]  # the setting

    def compose(self, arguments: Namespace, overrides: Sequence[str]) -> Settings:
        """Return the settings with the first of the parts; `parts` has all of them by name."""
        from rhymerl.config.composition import parse

        read = {word: parse([word])[0] for word in overrides}
        lists = [
            word for word, each in read.items() if each.key_or_group == self.part and isinstance(each.value(), list)
        ]
        self.parts: dict[str, Any] = {}
        if not lists:
            return super().compose(arguments, overrides)
        names: Any = read[lists[-1]].value()
        if len(set(map(str, names))) < max(len(names), 2) or not all(isinstance(name, str) for name in names):
            raise UsageError(f"{lists[-1]}: expected at least two names, none of them twice")
        if arguments.print_config:
            raise UsageError(f"--print-config shows the settings of one {self.part}, not of {len(names)}")
        others = [word for word in overrides if word not in lists]
        configs = [super(JudgingCommand, self).compose(arguments, [*others, f"{self.part}={name}"]) for name in names]
        classes = [name.rpartition(".")[2] for name in names]
        shown = classes if len(set(classes)) == len(names) else names
        self.parts = {name: config[self.part] for name, config in zip(shown, configs, strict=True)}
        return configs[0]


class ReplayCommand(JudgingCommand):
    """judge a drafter, or compare drafter=[paper,ngram], on recorded rollouts (TRACE), without a model"""

    name = "replay"
    part = "drafter"
    usage = "TRACE [key=value ...] [--config NAME|PATH]"
    default_config = "replay"

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("trace", metavar="TRACE", help="recorded rollouts, .jsonl or .jsonl.gz")

    def settings(self, arguments: Namespace) -> dict[str, Any]:
        return {"trace": arguments.trace}

    def run_config(self, config: Settings, arguments: Namespace, interrupt: Interrupt) -> Result:
        progress = self.progress()
        with progress.during("rhymerl replay: loading"):
            from rhymerl.runs.judging import judge, replay_trace
            from rhymerl.runs.replay_report import draw, report, report_several

        if self.parts:
            result = judge(config, self.parts, progress=progress)
            drafters = result["drafters"]
            report_several(result)
        else:
            result = replay_trace(config, progress=progress)
            drafters = {config.drafter["_target_"].rpartition(".")[2]: result}
            report(result)
        if config.chart is not None:
            draw(drafters, Path(config.chart))
        return result


class SimulateCommand(JudgingCommand):
    """judge a scheduler, or compare scheduler=[sorted,paced], on synthetic or recorded lengths, for many workers"""

    name = "simulate"
    part = "scheduler"
    usage = "[key=value ...] [--config NAME|PATH]"
    default_config = "simulate"

    def run_config(self, config: Settings, arguments: Namespace, interrupt: Interrupt) -> Result:
        progress = self.progress()
        with progress.during("rhymerl simulate: loading"):
            from rhymerl.simulation import comparison, sizing

        if config.gpus is not None:
            result = sizing.size(config, progress=progress)
            sizing.report(result)
            return result
        if self.parts:
            result = comparison.compare_several(config, self.parts, progress=progress)
            comparison.report_several(result)
            return result
        result = comparison.compare(config, progress=progress)
        comparison.report(result)
        return result
