"""Settings on their way out: as text, into the run directory, into the checkpoint."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rhymerl.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def to_yaml(config: DictConfig) -> str:
    """Return every setting with its value; what follows another setting says so (`seed: ${seed}`).

    The text is a config file: loaded, it is the same config, and an override still reaches all that follow it.
    """
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(config)


def save_config(config: DictConfig, run_dir: str | Path) -> Path:
    """Write `run_dir/config.yaml`, as `to_yaml` says. Raises ConfigError when it cannot be written."""
    path = Path(run_dir) / "config.yaml"
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(to_yaml(config), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"run_dir={str(run_dir)!r}: cannot be written to: {error.strerror}") from error
    return path


def keep_former(config: DictConfig, run_dir: str | Path) -> Path | None:
    """Copy a `config.yaml` with other settings than these to `config.N.yaml`, which is returned; None where there is none."""
    path = Path(run_dir) / "config.yaml"
    if not path.exists() or path.read_text(encoding="utf-8") == to_yaml(config):
        return None
    former = next(each for number in count(1) if not (each := path.with_name(f"config.{number}.yaml")).exists())
    shutil.copy2(path, former)
    return former


def resolved(config: DictConfig) -> dict[str, Any]:
    """Return all settings in plain containers without references, for a checkpoint or a logger."""
    from omegaconf import OmegaConf

    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
