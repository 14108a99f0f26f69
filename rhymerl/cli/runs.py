"""Commands on training runs, estimates of one among them, and rollouts without training."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rhymerl.cli.base import ConfiguredCommand, Result, Settings
from rhymerl.cli.hints import did_you_mean_config
from rhymerl.cli.interrupt import Interrupt
from rhymerl.distributed.first import is_first_rank
from rhymerl.errors import UsageError


class FitCommand(ConfiguredCommand):
    """train a policy; the run directory gets checkpoints, logs and summary.json"""

    name = "fit"
    is_told_early = True

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--dry-run", action="store_true", help="make all checks, print what a rank's memory would hold, and stop"
        )

    def check_early(self, config: str, overrides: Sequence[str]) -> None:
        with self.progress().during("rhymerl fit: looking at paths and data"):
            from rhymerl.config.composition import written
            from rhymerl.runs.early import check_early

            check_early(written(config, overrides))

    def run_config(self, config: Settings, arguments: Namespace, interrupt: Interrupt) -> Result | None:
        progress = self.progress()
        with progress.during("loading torch and Lightning"):
            from rhymerl.callbacks import StopOnRequest
            from rhymerl.runs.fit import fit

        callbacks = [StopOnRequest(interrupt)]
        return _said_once(fit(config, callbacks=callbacks, progress=progress, is_dry=arguments.dry_run))


class RunCommand(ConfiguredCommand):
    """A command on the directory of a run, RUN, with the run's own config."""

    word = "run"
    takes = "fit"

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("run", metavar="RUN", nargs="?", help="the directory of a run; it brings its config")

    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> Result | None:
        if arguments.run is not None:
            if arguments.config is not None:
                raise UsageError(f"rhymerl {self.name} takes RUN or --config, not both: a run has its own config.yaml")
            if any(word.startswith("run_dir=") for word in overrides):
                raise UsageError(f"rhymerl {self.name} takes RUN or run_dir=, not both")
            path = Path(arguments.run, "config.yaml")
            if not path.is_file():
                near = did_you_mean_config(arguments.run, "fit") if not isinstance(self, ResumeCommand) else ""
                raise UsageError(f"RUN={arguments.run!r}: not the directory of a run (it has no config.yaml){near}")
            arguments.config = str(path)
        arguments.names_checkpoint = any(word.startswith("ckpt_path=") for word in overrides)
        return super().run(arguments, overrides, interrupt)

    def settings(self, arguments: Namespace) -> dict[str, Any]:
        """The directory may have been moved, and the config may say where the run came from."""
        if arguments.run is None:
            return {}
        return {"run_dir": arguments.run, **({} if arguments.names_checkpoint else {"ckpt_path": "auto"})}


class ResumeCommand(RunCommand, FitCommand):
    """go on with a run (RUN) from its newest whole checkpoint; key=value changes its settings"""

    name = "resume"
    usage = "RUN [key=value ...]"
    config_help = SUPPRESS  # a run has its own

    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> Result | None:
        if arguments.run is None:
            raise UsageError("rhymerl resume needs RUN: the directory of a run")
        return super().run(arguments, overrides, interrupt)


class ForkCommand(RunCommand, FitCommand):
    """go on from a checkpoint of a run (RUN@STEP) in run_dir=DIR, with settings changed and the same noise"""

    name = "fork"
    usage = "RUN[@STEP] run_dir=DIR [key=value ...]"
    config_help = SUPPRESS  # a run has its own

    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> Result | None:
        if arguments.run is None:
            raise UsageError("rhymerl fork needs RUN or RUN@STEP: the directory of a run, and the step to go on from")
        given = {word.partition("=")[0]: word.partition("=")[2] for word in overrides}
        run_dir, step = _split_run(arguments.run)
        if "run_dir" not in given or Path(given["run_dir"]).resolve() == run_dir.resolve():
            raise UsageError("rhymerl fork needs run_dir=DIR: another directory than that of RUN")
        same_noise = "a fork has the noise of its run, or nothing could be compared"
        for name, why in {"ckpt_path": "RUN@STEP says it", "seed": same_noise}.items():
            if name in given:
                raise UsageError(f"rhymerl fork takes no {name}=: {why}")
        config = run_dir / "config.yaml"
        if not config.is_file():
            raise UsageError(f"RUN={str(run_dir)!r}: not the directory of a run (it has no config.yaml)")
        arguments.config, arguments.ckpt_path = str(config), _checkpoint_of(run_dir, step)
        return super(RunCommand, self).run(arguments, overrides, interrupt)

    def settings(self, arguments: Namespace) -> dict[str, Any]:
        return {"ckpt_path": arguments.ckpt_path}


class EvaluateCommand(RunCommand):
    """answer validation prompts with a run's newest checkpoint (RUN), a policy, or ckpt_path=PATH|last|best|auto"""

    name = "evaluate"
    usage = "RUN [key=value ...]\n--config NAME|PATH [key=value ...]"
    needs = "RUN or --config"
    is_told_early = True

    def run_config(self, config: Settings, arguments: Namespace, interrupt: Interrupt) -> Result | None:
        progress = self.progress()
        with progress.during("loading torch and Lightning"):
            from rhymerl.runs.fit import evaluate

        return _said_once(evaluate(config, progress=progress))


def _split_run(word: str) -> tuple[Path, int | None]:
    """Return the directory and the step of RUN@STEP; None for the newest one."""
    name, at, step = word.rpartition("@")
    if not at or Path(word).is_dir():
        return Path(word), None
    if not step.isdigit():
        raise UsageError(f"RUN@STEP={word!r}: expected a number of steps behind the @")
    return Path(name), int(step)


def _checkpoint_of(run_dir: Path, step: int | None) -> str | None:
    """Return the checkpoint after a step; None for step 0, from which a run starts over."""
    if step == 0:
        return None
    folder = run_dir / "checkpoints"
    path = folder / ("last.ckpt" if step is None else f"step={step}.ckpt")
    if not path.is_file():
        there = sorted(int(each.stem.partition("=")[2]) for each in folder.glob("step=*.ckpt"))
        known = ", ".join(map(str, [0, *there]))
        raise UsageError(
            f"RUN@STEP: {str(run_dir)!r} has no checkpoint {path.name}; it can be forked at {known}. "
            "checkpoint.every_n_steps and checkpoint.keep say which ones stay"
        )
    return str(path)


def _said_once(result: Mapping[str, Any]) -> Result | None:
    return result if is_first_rank() else None


class PlanCommand(ConfiguredCommand):
    """estimate what each rank of a training run would hold and send, from its settings and the model's config alone"""

    name = "plan"
    usage = "[key=value ...] [--config NAME|PATH] [--device-gib GIB]"
    default_config = "base"
    takes = "fit"
    is_told_early = True

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--device-gib",
            type=float,
            metavar="GIB",
            help="the memory of a rank's device; by default that of the GPU here",
        )

    def run_config(self, config: Settings, arguments: Namespace, interrupt: Interrupt) -> Result | None:
        with self.progress().during("loading torch and Lightning"):
            from rhymerl.runs.plan import plan

        return plan(config, device_gib=arguments.device_gib)


class RolloutCommand(ConfiguredCommand):
    """answer prompts in several epochs (passes=3), with drafts from those before, and record the answers (out=FILE)"""

    name = "rollout"
    usage = "model.path=DIR data.prompts=FILE out=FILE [key=value ...] [--config NAME|PATH]"
    is_told_early = True
    default_config = "rollout"

    def run_config(self, config: Settings, arguments: Namespace, interrupt: Interrupt) -> Result:
        progress = self.progress()
        with progress.during("rhymerl rollout: loading torch"):
            from rhymerl.runs.generate import generate, report

        result = generate(config, progress=progress)
        report(result)
        return result
