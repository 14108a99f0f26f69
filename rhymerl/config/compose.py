"""Compose a config name and overrides into checked settings."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig


def packaged_names() -> list[str]:
    """Return the names that `--config` takes."""
    from rhymerl.config import files

    return files.packaged_names()


def compose(name_or_path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Return the settings of a packaged config or of the user's own .yaml file, overridden, complete and checked.

    `overrides` are `key=value` in Hydra's grammar. A group (`drafter=ngram`) takes a packaged option, one beside the
    user's file, or a dotted class path, and replaces the whole node; what it then contains can be overridden in the same
    call, in any order. Every argument of every class is filled in. `${key}` stays as it is and follows overrides; other
    interpolations (`${now:%H}`, `${asset:NAME}`, `${config_name:}`) are replaced by their values, but for text out of the
    environment (`${oc.env:NAME}`), which may be a key.

    Raises ConfigError naming the setting, its value and what is allowed.
    """
    from rhymerl.config.build import build

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="In '.*': Defaults list is missing `_self_`")
        return build(name_or_path, overrides)
