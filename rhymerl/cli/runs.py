"""Commands on training runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rhymerl.cli.base import ConfiguredCommand, Result
from rhymerl.cli.interrupt import Interrupt
from rhymerl.errors import UsageError
from rhymerl.ranks.first import is_first_rank

if TYPE_CHECKING:
    from omegaconf import DictConfig


class Fit(ConfiguredCommand):
    """train a policy; the run directory gets checkpoints, logs and summary.json"""

    name = "fit"

    def run_config(self, config: DictConfig, interrupt: Interrupt) -> Result | None:
        from rhymerl.callbacks import StopOnRequest
        from rhymerl.run import fit

        _check_is_run(config, "fit")
        return _said_once(fit(config, callbacks=[StopOnRequest(interrupt)]))


class Evaluate(ConfiguredCommand):
    """answer the validation prompts with a policy, or with a checkpoint (ckpt_path=PATH|last)"""

    name = "evaluate"

    def run_config(self, config: DictConfig, interrupt: Interrupt) -> Result | None:
        from rhymerl.run import evaluate

        _check_is_run(config, "evaluate")
        return _said_once(evaluate(config))


def _said_once(result: Mapping[str, Any]) -> Result | None:
    return result if is_first_rank() else None


def _check_is_run(config: DictConfig, command: str) -> None:
    if "module" not in config:
        raise UsageError(f"rhymerl {command}: the config has no section 'module'; build on base.yaml")
