"""Settings on their way out: as text, into the run directory, into the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rhymerl.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def to_yaml(config: DictConfig) -> str:
    """Every setting with its value; what follows another setting says so (`seed: ${seed}`).

    The text is a config file: loaded, it is the same config, and an override still reaches all that follow it.
    """
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(config)


def save_config(config: DictConfig, run_dir: str | Path) -> Path:
    """Write `run_dir/config.yaml`, as `to_yaml` says. Raises ConfigError when it cannot be written."""
    path = Path(run_dir) / "config.yaml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_yaml(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run_dir={str(run_dir)!r}: cannot be written to: {error.strerror}") from error
    return path


def resolved(config: DictConfig) -> dict[str, Any]:
    """All settings in plain containers without references, for a checkpoint or a logger."""
    from omegaconf import OmegaConf

    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
