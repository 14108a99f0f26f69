"""The settings of runs, and in what they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rhymerl.config.changes import leaves
from rhymerl.config.files import read_chain

_NOT_OF_THE_RUN = ("run_dir", "ckpt_path")


def flat_settings(path: Path) -> dict[str, str]:
    """Return all settings of a `config.yaml` as text by dotted key; what follows another setting says so.

    Raises ConfigError naming the file when it cannot be read.
    """
    from omegaconf import OmegaConf

    found: Any = OmegaConf.to_container(read_chain(path)[-1].body)
    return {key: _shown(value) for key, value in leaves(found, "")}


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def differences(runs: Sequence[Mapping[str, str]]) -> dict[str, list[str | None]]:
    """Return the values, run by run, of settings that are not the same in all; None where a run has none."""
    keys = dict.fromkeys(key for settings in runs for key in settings if key not in _NOT_OF_THE_RUN)
    found = {key: [settings.get(key) for settings in runs] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}
