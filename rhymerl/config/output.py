"""Settings on their way out: as text, into the run directory, into the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
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


def recorded(config: DictConfig) -> dict[str, Any]:
    """Return all settings in plain containers without references, to be written down: what comes from the environment is only named."""
    from rhymerl.config.nodes import environment_named

    with environment_named():
        return resolved(config)


def with_names(values: Any, config: DictConfig) -> Any:
    """Return plain containers in which text that a config takes from the environment is only named, as `recorded` does."""
    names = {text: name for text, name in _pairs(resolved(config), recorded(config)) if text != name}

    def named(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: named(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [named(item) for item in value]
        return names.get(value, value) if isinstance(value, str) else value

    return named(values) if names else values


def _pairs(one: Any, other: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts at the same places of two containers of one shape."""
    if isinstance(one, str):
        yield one, other
    elif isinstance(one, Mapping | list):
        keys = one if isinstance(one, Mapping) else range(len(one))
        for key in keys:
            yield from _pairs(one[key], other[key])


def resolved(config: DictConfig) -> dict[str, Any]:
    """Return all settings in plain containers without references, to build from. They may have keys; `recorded` has none."""
    from omegaconf import OmegaConf

    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
