"""Composition: what files and the command line say becomes complete, checked settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from rhymerl.config.annotations import stands_for_component
from rhymerl.config.files import ConfigFile, Layer, folders_beside, layers, locate, packaged_directory, read_chain
from rhymerl.config.interpolation import interpolate, located_errors
from rhymerl.config.schema import check, expand, kinds_by_key, unknown
from rhymerl.config.tree import ABSENT, child, is_component, join, origin
from rhymerl.errors import ConfigError

_PLAIN = re.compile(r"([+]{0,2}[^=~\s]+)=([^\[{'\"].*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What settings come from: files, in layers with the choices of groups, then the overrides that are none."""

    path: Path
    chain: Sequence[ConfigFile]
    layers: Sequence[Layer]
    overrides: Sequence[Override]


def compose(name_or_path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Return the settings of a packaged config or of the user's own .yaml file, overridden, complete and checked.

    `overrides` are `key=value` in Hydra's grammar. A group (`drafter=ngram`) takes a packaged option, one beside the
    user's file, or a dotted class path, and replaces the whole node; what it then contains can be overridden in the
    same call, in any order. Every argument of every class is filled in. `${key}` stays as it is and follows overrides;
    other interpolations (`${now:%H}`, `${asset:NAME}`, `${config_name:}`) are replaced by their values, but for text
    out of the environment (`${oc.env:NAME}`), which may be a key.

    Raises ConfigError naming the setting, its value and what is allowed.
    """
    sources = sources_of(name_or_path, overrides)
    config = merged(sources.path, sources.layers)
    _apply_all(config, sources.overrides)
    interpolate(config, sources.path.stem)
    root = merged(sources.path, [file for file in sources.chain if file.is_root])
    check(config, root | dict.fromkeys(group for file in sources.chain for group in file.choices))
    composed = OmegaConf.create(config)
    OmegaConf.set_struct(composed, True)
    return composed


def written(name_or_path: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return what files and overrides say, before any class is imported: without defaults, and unchecked.

    What cannot be told without the classes stays as it is written; `compose` finds out, and raises for it.
    """
    sources = sources_of(name_or_path, overrides)
    config = merged(sources.path, sources.layers)
    for override in sources.overrides:
        with suppress(ConfigError):
            _apply(config, override)
    with suppress(ConfigError):
        interpolate(config, sources.path.stem)
    return config


def sources_of(name_or_path: str | Path, overrides: Sequence[str]) -> Sources:
    """Read the files and the overrides. Raises ConfigError for unreadable ones, and for unknown options of groups."""
    path = locate(name_or_path)
    chain = read_chain(path)
    groups = {group for file in chain for group in file.choices}
    groups |= {str(name) for file in chain for name in file.body if (packaged_directory() / str(name)).is_dir()}
    chosen: dict[str, str | None] = {}
    values: list[Override] = []
    for override in parse(overrides):
        value = override.value()
        if override.key_or_group in groups and isinstance(value, str | None) and not override.is_delete():
            chosen[override.key_or_group] = value
        else:
            values.append(override)
    found = layers(chain, folders_beside(path), chosen)
    return Sources(path=path, chain=chain, layers=found, overrides=values)


def merged(path: Path, sources: Sequence[Layer | ConfigFile]) -> dict[str, Any]:
    """Return what the layers of a config, or some files of its, say together."""
    with located_errors(path.stem):
        found: Any = OmegaConf.to_container(OmegaConf.merge(*(each.body for each in sources)))
    return dict(found)


# -- overrides -------------------------------------------------------------------------------------------------------


def parse(overrides: Sequence[str]) -> list[Override]:
    """Read overrides in Hydra's grammar; `~key` removes a key. Raises ConfigError for an unreadable one."""
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
    return parsed


def _read(parser: OverridesParser, text: str) -> Override:
    """Text that Hydra's grammar would want in quotes, such as `step=10.ckpt` or `\\d+`, is taken as it stands."""
    found = None if "${" in text else _PLAIN.fullmatch(text)
    quoted = f"{found[1]}={QuotedString(found[2], Quote.single).with_quotes()}" if found is not None else text
    if "\\" in text:  # which Hydra takes for an escape in some places
        return parser.parse_override(quoted)
    try:
        return parser.parse_override(text)
    except HydraException:
        return parser.parse_override(quoted)


def _apply_all(config: dict[str, Any], overrides: Sequence[Override]) -> None:
    """Apply overrides that name a class first, since the others are about the new class; else keep their order."""
    named = [each for each in overrides if each.key_or_group.endswith("._target_") or is_component(each.value())]
    for override in named:
        _apply(config, override)
    expand(config)
    others = [each for each in overrides if each not in named]
    kinds = kinds_by_key(config) if others else {}

    def is_class_path(each: Override) -> bool:
        wanted = kinds.get(origin(config, each.key_or_group), ())
        return any(stands_for_component(each.value(), kind) for kind in wanted)

    for override in sorted(others, key=is_class_path, reverse=True):
        _apply(config, override)
        expand(config)


def _apply(config: dict[str, Any], override: Override) -> None:
    """Write one override into an expanded config, at the place that its key refers to.

    Names are checked afterwards; mappings are merged, unless one names another class.
    """
    key = override.key_or_group
    value = override.value()
    above, _, name = key.rpartition(".")
    parent = _container_at(config, origin(config, above), key)
    present = child(parent, name)
    if override.is_delete() and present is ABSENT:
        raise unknown(config, key)
    if isinstance(parent, list) and present is ABSENT:
        raise ConfigError(f"unknown setting {key}: the list has {len(parent)} items, counted from 0")
    place: Any = int(name) if isinstance(parent, list) else name
    if override.is_delete():
        del parent[place]
        return
    if name == "_target_":
        parent.clear()
    is_tuned = isinstance(present, dict) and isinstance(value, dict) and not is_component(value)
    parent[place] = OmegaConf.to_container(OmegaConf.merge(present, value)) if is_tuned else value


def _container_at(config: dict[str, Any], key: str, overridden: str) -> Any:
    """Return the container at `key`, made where there is none yet, for an override of `overridden`."""
    node: Any = config
    done = ""
    for part in key.split(".") if key else []:
        done, above, node = join(done, part), node, child(node, part)
        if isinstance(above, dict) and (node is ABSENT or node is None):
            node = above[part] = {}
        elif not isinstance(node, dict | list):
            raise ConfigError(f"unknown setting {overridden}: {done} is a value, not a mapping")
    return node
