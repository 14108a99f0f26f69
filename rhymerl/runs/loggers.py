"""The loggers of a run, from its setting `logger`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from omegaconf import DictConfig, OmegaConf

from rhymerl.config import instantiate, resolved
from rhymerl.config.files import options, packaged_directory
from rhymerl.config.targets import import_target, is_dotted_path
from rhymerl.errors import ConfigError, did_you_mean

_DEFAULT = "tensorboard"
_EXTRAS = {"wandb": "pip install 'rhymerl[wandb]'"}


def loggers_of(config: DictConfig, *, first_step: int | None = None) -> Any:
    """Return the loggers that `logger` asks for, or what Lightning's own flag `trainer.logger` says instead.

    TensorBoard's curves of a run that goes on are cut off at `first_step`, from which they are written anew. Raises
    ConfigError.
    """
    settings = resolved(config)
    asked, flag = settings["logger"], settings["trainer"].get("logger")
    if flag is not None and flag is not True:
        is_default = asked == _DEFAULT or (
            isinstance(asked, Mapping) and asked["_target_"] == _node(_DEFAULT, config)["_target_"]
        )
        if asked and not is_default:
            raise ConfigError(f"trainer.logger={flag!r}: the run has `logger` already; expected null, or logger=null")
        return flag
    several = asked if isinstance(asked, list) else [asked] if asked else []
    return [_build(_node(each, config), first_step) for each in several]


def _node(asked: object, config: DictConfig) -> dict[str, Any]:
    """Return a logger's node: of a packaged option, of a class by its dotted path, or as it is."""
    if isinstance(asked, Mapping) and "_target_" in asked:
        return dict(asked)
    folder = packaged_directory() / "logger"
    known = options([folder])
    if asked in known:
        option = OmegaConf.load(folder / f"{asked}.yaml")
        node: dict[str, Any] = resolved(OmegaConf.create({"run_dir": config.run_dir, "it": option}))["it"]
        return node
    if isinstance(asked, str) and is_dotted_path(asked):
        return {"_target_": asked}
    near = did_you_mean(str(asked), known)
    raise ConfigError(
        f"logger={asked!r}: expected {', '.join(known)}, a dotted class path, a mapping with _target_, or a list of these{near}"
    )


def _build(node: dict[str, Any], first_step: int | None) -> Logger:
    if first_step is not None and import_target(node["_target_"], setting="logger") is TensorBoardLogger:
        node = {"purge_step": first_step, **node}
    try:
        logger = instantiate(node, key="logger")
    except ModuleNotFoundError as error:
        name = next((each for each in _EXTRAS if each in node["_target_"].lower()), None)
        needed = f"needs {name}: {_EXTRAS[name]}" if name else " ".join(str(error).split())
        raise ConfigError(f"logger={node['_target_']}: {needed}") from error
    if not isinstance(logger, Logger):
        raise ConfigError(f"logger={node['_target_']}: expected a Lightning Logger, it is a {type(logger).__name__}")
    return logger
