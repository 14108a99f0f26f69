"""A setting as constructors and config files describe it: type, default, documentation, origin of its value."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rhymerl.config import other_names
from rhymerl.config.annotations import in_words
from rhymerl.config.composition import Sources, merged, sources_of
from rhymerl.config.files import folders_beside, layers, options, packaged_directory
from rhymerl.config.interpolation import value_at
from rhymerl.config.schema import Component, classes, kinds_by_key, plain_default, unknown
from rhymerl.config.targets import REQUIRED, import_target, signature_of
from rhymerl.config.tree import ABSENT, find, is_component, join, link_of, origin, walk
from rhymerl.errors import ConfigError

_COMMAND_LINE = "the command line"
_CONSTRUCTOR = "the constructor's default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One setting, or a section of them."""

    key: str  # where its value is written
    value: Any  # in plain containers; ??? where it has to be given
    type: str | None  # in words; None where no constructor takes it
    default: Any  # the constructor's; None also where there is none
    options: Sequence[str]  # of a group
    set_in: str
    owner: str | None  # the class whose argument it is; of a section, the class that it makes
    about: str  # the comment beside it, and what the class says of it
    followed_by: Sequence[str]  # settings that are ${this one}
    elsewhere: Sequence[str]  # its names in TRL and verl
    settings: Mapping[str, str]  # of a section: name -> value, type and what it is for, in words


def explain(composed: DictConfig, key: str, name_or_path: str | Path, overrides: Sequence[str] = ()) -> Explanation:
    """Explain a setting of a config that was composed from `name_or_path` and `overrides`.

    A name of TRL or verl is that of the setting here. Raises ConfigError with the nearest name, or the option that has
    it, for a setting that nothing knows.
    """
    config: Any = OmegaConf.to_container(composed)
    sources = sources_of(name_or_path, overrides)
    key = origin(config, key)
    if find(config, key) is ABSENT:
        key = origin(config, other_names.here(key) or key)
    node = find(config, key)
    if node is ABSENT:
        raise _not_there(config, key, sources.path)
    above, _, name = key.rpartition(".")
    components = {each.key: each for each in classes(config)}
    made, owner = components.get(key), components.get(above)
    parameter = owner.signature.parameters.get(name) if owner else None
    described = made or (owner if parameter else None)
    wanted = [parameter.annotation] if parameter else kinds_by_key(config).get(key, [])
    is_section = isinstance(node, dict) and bool(node)
    return Explanation(
        key=key,
        value=value_at(config, key),
        type=in_words(wanted[0]) if wanted else None,
        default=_default(parameter) if parameter else None,
        options=options(folders_beside(sources.path, key)) if (packaged_directory() / key).is_dir() else (),
        set_in=_set_in(config, key, sources),
        owner=described.path if described else None,
        about=_about(key, sources, owner if parameter else None, made),
        followed_by=[each for each, value in walk(config) if link_of(value) == key and not is_section],
        elsewhere=other_names.elsewhere(key),
        settings=_settings(config, key, made) if is_section else {},
    )


def _not_there(config: dict[str, Any], key: str, path: Path) -> ConfigError:
    """Return the error for an unknown setting, which may be one of another option of its group."""
    group, _, name = key.partition(".")
    having = [
        option
        for option in options(folders_beside(path, group))
        for node in [merged(path, layers([], folders_beside(path), {group: option}))[group]]
        if is_component(node) and name in signature_of(import_target(node["_target_"], setting=group)).parameters
    ]
    if not having:
        return unknown(config, key)
    present = value_at(config, f"{group}._target_") if is_component(config.get(group)) else None
    others = " or ".join(f"{group}={option}" for option in having)
    return ConfigError(
        f"{key}: {present.rpartition('.')[2] if present else f'{group}=null'} has no such setting; {others} has it"
    )


def _default(parameter: inspect.Parameter) -> Any:
    default = plain_default(parameter)
    if default is ABSENT:
        return repr(parameter.default)
    return None if parameter.default is REQUIRED else default


def _settings(config: dict[str, Any], key: str, owner: Component | None) -> dict[str, str]:
    parameters = owner.signature.parameters if owner else {}
    found = {}
    for name, given in find(config, key).items():
        if name != "_target_":
            value = value_at(config, join(key, name)) if link_of(given) is None else given
            kind = in_words(parameters[name].annotation) if name in parameters else type(value).__name__
            words = " ".join(_said_of(owner.target, name).split("\n\n")[0].split()) if owner else ""
            found[str(name)] = f"{in_yaml(value)} ({kind})" + (f": {words}" if words else "")
    return found


def _set_in(config: dict[str, Any], key: str, sources: Sources) -> str:
    """Return the last place that says the value, in the order in which a config is composed."""
    overridden = [f"{origin(config, each.key_or_group)}." for each in sources.overrides]
    saying = [layer.source for layer in sources.layers if find(layer.body, key) is not ABSENT]
    saying += [None for each in overridden if f"{key}.".startswith(each)]
    if not saying:
        return _CONSTRUCTOR
    path, packaged = saying[-1], packaged_directory()
    if path is None:
        return _COMMAND_LINE
    return f"configs/{path.relative_to(packaged)}" if path.is_relative_to(packaged) else str(path)


def in_yaml(value: Any) -> str:
    """Return a value as one writes it: null, true, 0.1, [1, 2]; a component by its class."""
    if isinstance(value, Mapping) and "_target_" in value:
        return str(value["_target_"]).rpartition(".")[2]
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return "required" if value == "???" else str(value)


# -- what is said of it ----------------------------------------------------------------------------------------------


def _about(key: str, sources: Sources, owner: Component | None, made: Component | None) -> str:
    texts = [file.path.read_text(encoding="utf-8") for file in sources.chain]
    comments = [words for text in texts if (words := comments_of(text).get(key))]
    described = _docstring(made.target) if made else ""
    if not described and owner is not None:
        described = _said_of(owner.target, key.rpartition(".")[2]) or _docstring(owner.target)
    return "\n\n".join(each for each in (*comments[-1:], described) if each)


def comments_of(text: str) -> dict[str, str]:
    """Return what a config file, or a dataclass, says behind its settings (`seed: 0 # words`), by dotted key."""
    above: list[tuple[int, str]] = []  # the mappings in which a line stands, with their indentation
    found: dict[str, str] = {}
    for line in text.splitlines():
        setting = re.match(r"( *)([A-Za-z_][\w-]*):(?: .*?)?(?: # (.+))?$", line)
        if setting is None:
            continue
        indentation = len(setting[1])
        above = [each for each in above if each[0] < indentation] + [(indentation, setting[2])]
        if setting[3]:
            found[".".join(name for _, name in above)] = setting[3].strip()
    return found


def _said_of(target: Callable[..., Any], name: str) -> str:
    """Return what a class says of an argument: in a list, beside its field, or in the sentences that name it."""
    return _entry(target, name) or _beside(target, name) or _sentences(target, name)


def _sentences(target: Callable[..., Any], name: str) -> str:
    sentences = re.split(r"(?<=\.) ", " ".join(_docstring(target).split()))
    return " ".join(each for each in sentences if re.search(rf"`{name}\b", each))


def _docstring(target: Callable[..., Any]) -> str:
    return inspect.getdoc(target) or ""


def _beside(target: Callable[..., Any], name: str) -> str:
    """Return the comment beside a field of this name, of the class or of one that it extends."""
    for each in inspect.getmro(target) if isinstance(target, type) else ():
        if name in vars(each).get("__annotations__", {}):
            return comments_of(inspect.getsource(each)).get(name, "")
    return ""


def _entry(target: Callable[..., Any], name: str) -> str:
    """Return what a docstring with a list of arguments (`name: words`, indented) says of this one."""
    for each in (target, target.__init__):
        found = re.search(rf"^( +){name}(?: \(.*\))?: (.*(?:\n(?:\1 +.*|(?=\n)))*)", _docstring(each), re.MULTILINE)
        if found:
            return inspect.cleandoc(found[2])
    return ""
