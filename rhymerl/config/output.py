"""Output of settings: into the run directory, into the checkpoint, and changes since they were written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rhymerl.config.interpolation import environment_named, map_text
from rhymerl.config.tree import leaves, walk
from rhymerl.errors import ConfigError

_NOTHING = "nothing"


def save_config(config: DictConfig, run_dir: str | Path) -> Path | None:
    """Write `run_dir/config.yaml`; return where one with other settings is kept: `config.N.yaml`.

    What follows another setting says so (`seed: ${seed}`): loaded, the file is the same config, and an override still
    reaches all that follow it. Raises ConfigError when it cannot be written.
    """
    path, text = Path(run_dir) / "config.yaml", OmegaConf.to_yaml(config)
    former: Path | None = None
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            former = next(each for n in count(1) if not (each := path.with_name(f"config.{n}.yaml")).exists())
            shutil.copy2(path, former)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"run_dir={str(run_dir)!r}: cannot be written to: {error.strerror}") from error
    return former


def resolved(config: DictConfig) -> dict[str, Any]:
    """Return all settings in plain containers without references, to build from; they may hold secret keys."""
    found: Any = OmegaConf.to_container(config, resolve=True)
    return {str(key): value for key, value in found.items()}


def recorded(config: DictConfig) -> dict[str, Any]:
    """Return all settings in plain containers without references, to save: values from the environment are named."""
    named = resolved(environment_named(OmegaConf.to_container(config)))
    found: dict[str, Any] = map_text(named, lambda text: text.replace("${rhymerl.env:", "${oc.env:"))
    return found


def with_names(values: Any, config: DictConfig) -> Any:
    """Return plain containers in which values that a config takes from the environment are only named."""
    pairs = zip(walk(resolved(config)), walk(recorded(config)), strict=True)
    names = {text: name for (_, text), (_, name) in pairs if isinstance(text, str) and text != name}
    return map_text(values, lambda text: names.get(text, text)) if names else values


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting, by its dotted key, that differs from a checkpoint's."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.now}"


def changes(before: Mapping[str, Any], config: DictConfig) -> list[Change]:
    """Return the settings whose values differ from `before`, a resolved config.

    A setting that only one of them has is `nothing` in the other. What follows another setting (`${seed}`) is left out:
    that one is there itself.
    """
    now: dict[str, Any] = dict(leaves(OmegaConf.to_container(config)))  # type: ignore[arg-type]
    links = tuple(f"{key}." for key, value in now.items() if isinstance(value, str) and value.startswith("${"))
    before = dict(leaves(before))
    return [
        Change(key=key, before=before.get(key, _NOTHING), now=now.get(key, _NOTHING))
        for key in dict.fromkeys((*before, *now))
        if not f"{key}.".startswith(links) and (key not in before or key not in now or before[key] != now[key])
    ]
