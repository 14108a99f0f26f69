"""Overrides from the command line: `key=value` in Hydra's grammar, `~key` to take something out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as HydraOverride
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf

from rhymerl.config.annotations import is_component
from rhymerl.config.nodes import entries, find, join, origin
from rhymerl.config.schema import unknown
from rhymerl.errors import ConfigError

_PLAIN = re.compile(r"([+]{0,2}[^=~\s]+)=([^\[{'\"].*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One override: a new value for `key`, or its removal."""

    key: str
    value: Any
    is_removal: bool = False


def parse(overrides: Sequence[str]) -> list[Override]:
    """Raises ConfigError for one that cannot be read."""
    parser = OverridesParser.create()
    return [_parse(parser, text) for text in overrides]


def _parse(parser: OverridesParser, text: str) -> Override:
    if "=" not in text and not text.startswith("~"):
        raise ConfigError(f"{text!r}: expected an override of the form key=value")
    try:
        parsed = _read(parser, text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{text!r}: cannot be read as key=value ({reason}); quote the value: key='\"...\"'"
        ) from error
    if parsed.is_sweep_override():
        raise ConfigError(
            f"{text!r}: expected one value; write a list as [a,b], and quote a text with commas: '\"a,b\"'"
        )
    if not parsed.key_or_group or parsed.package is not None:
        raise ConfigError(f"{text!r}: expected an override of the form key=value")
    return Override(key=parsed.key_or_group, value=parsed.value(), is_removal=parsed.is_delete())


def _read(parser: OverridesParser, text: str) -> HydraOverride:
    """Text that Hydra's grammar would want in quotes, such as `step=10.ckpt` or `\\d+`, is taken as it stands."""
    found = None if "${" in text else _PLAIN.fullmatch(text)
    quoted = f"{found[1]}={QuotedString(found[2], Quote.single).with_quotes()}" if found is not None else text
    if "\\" in text:  # which Hydra takes for an escape in some places
        return parser.parse_override(quoted)
    try:
        return parser.parse_override(text)
    except HydraException:
        return parser.parse_override(quoted)


def apply(config: DictConfig, override: Override) -> None:
    """Write one override into an expanded config, at the place that its key refers to.

    Names are checked afterwards; mappings are merged, unless one names another class.
    """
    key = origin(config, override.key, follow_last=False)
    above, _, name = key.rpartition(".")
    parent = _mapping_at(config, above, override)
    if override.is_removal:
        if name not in entries(parent):
            raise unknown(config, override.key)
        del parent[name]
    elif isinstance(parent, ListConfig):
        parent[_index(parent, name, override)] = override.value
    else:
        _write(parent, name, override.value)


def _write(parent: DictConfig, name: str, value: Any) -> None:
    if name == "_target_":
        parent.clear()
    if isinstance(value, dict) and not is_component(value) and isinstance(parent._get_node(name), DictConfig):
        value = OmegaConf.merge(parent._get_node(name), value)
    parent[name] = value


def _mapping_at(config: DictConfig, key: str, override: Override) -> Any:
    """Return the container at `key`, made where there is none yet."""
    done = ""
    for part in key.split(".") if key else []:
        parent, done = find(config, done), join(done, part)
        node = find(config, done)
        if (node is None and isinstance(parent, DictConfig)) or (node is not None and node._is_none()):
            parent[part] = {}
        elif not isinstance(node, DictConfig | ListConfig):
            raise ConfigError(f"unknown setting {override.key}: {done} is a value, not a mapping")
    return find(config, key)


def _index(parent: ListConfig, name: str, override: Override) -> int:
    if not name.isdigit() or int(name) >= len(parent):
        raise ConfigError(f"unknown setting {override.key}: the list has {len(parent)} items, counted from 0")
    return int(name)
