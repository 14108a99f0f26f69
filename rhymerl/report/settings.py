"""The settings of runs, and their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from rhymerl.config.tree import leaves
from rhymerl.errors import ConfigError

_NOT_OF_THE_RUN = ("run_dir", "ckpt_path")
_MOST_BYTES = 2**20


class _Plain(yaml.SafeLoader):  # type: ignore[misc]
    """Reads what a run writes, which has no aliases: a few of them stand for any number of settings."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases")
        return super().compose_node(parent, index)


def flat_settings(path: Path) -> dict[str, str]:
    """Return all settings of a `config.yaml` as text by dotted key.

    References to other settings stay as they are, since nothing is resolved. Raises ConfigError naming the file when it
    is not what a run writes there.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES // 2**20} MiB")
        found: Any = yaml.load(path.read_text(encoding="utf-8"), _Plain)
        if not isinstance(found, dict):
            raise ValueError("expected a mapping of settings")
        return {key: _shown(value) for key, value in leaves(found)}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def side_by_side(runs: Sequence[Mapping[str, str]]) -> dict[str, list[str | None]]:
    """Return the values of all settings, run by run; None where a run has none."""
    keys = dict.fromkeys(key for settings in runs for key in settings)
    return {key: [settings.get(key) for settings in runs] for key in keys}


def differences(runs: Sequence[Mapping[str, str]]) -> dict[str, list[str | None]]:
    """Return those of settings that are not the same in all runs."""
    found = side_by_side(runs).items()
    return {key: values for key, values in found if len(set(values)) > 1 and key not in _NOT_OF_THE_RUN}
