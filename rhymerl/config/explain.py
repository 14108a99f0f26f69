"""What a setting is, as constructors and config files say it: type, default, documentation, and where its value was set."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rhymerl.config.annotations import in_words
from rhymerl.config.components import plain
from rhymerl.config.files import ConfigFile, locate, options, packaged_directory, read_chain
from rhymerl.config.nodes import child, components, containers, entries, find, join, link_of, origin, value_at
from rhymerl.config.overrides import parse
from rhymerl.config.schema import signature_at, unknown
from rhymerl.config.targets import REQUIRED, Parameter, import_target, signature_of
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
    settings: Mapping[str, str]  # of a section: name -> type and value in words


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """The argument of a constructor that takes the value of a setting."""

    target: Callable[..., Any]
    path: str
    name: str
    parameter: Parameter
    is_linked: bool  # the setting is written elsewhere, and the argument is ${it}


def explain(config: DictConfig, key: str, name_or_path: str | Path, overrides: Sequence[str] = ()) -> Explanation:
    """Explain a setting of a config that was composed from `name_or_path` and `overrides`.

    Raises ConfigError with the nearest name, or the option that has it, for a setting that nothing knows.
    """
    chain = read_chain(locate(name_or_path))
    key = origin(config, key)
    node = find(config, key)
    if node is None:
        raise _not_there(config, key, chain[-1].path.parent)
    argument = _argument_of(config, key)
    own = argument if argument and not argument.is_linked else None
    is_section = isinstance(node, DictConfig) and bool(entries(node))
    made = value_at(node, "_target_") if is_section and "_target_" in entries(node) else None
    return Explanation(
        key=key,
        value=value_at(config, key),
        type=in_words(argument.parameter.annotation) if argument else None,
        default=_default(own.parameter) if own else None,
        options=options(key, chain[-1].path.parent) if (packaged_directory() / key).is_dir() else (),
        set_in=_set_in(config, key, chain, overrides),
        owner=made or (own.path if own else None),
        about=_about(key, chain, own, made),
        followed_by=[each for each in _links_to(config, key) if not is_section],
        settings=_settings(config, key) if is_section else {},
    )


def _not_there(config: DictConfig, key: str, directory: Path) -> ConfigError:
    """A setting may be one of another option of its group."""
    group, _, name = key.partition(".")
    having = [option for option in options(group, directory) if name in _arguments_of_option(group, option, directory)]
    if not having:
        return unknown(config, key)
    present = value_at(config, f"{group}._target_") if find(config, f"{group}._target_") is not None else None
    others = " or ".join(f"{group}={option}" for option in having)
    return ConfigError(
        f"{key}: {present.rpartition('.')[2] if present else f'{group}=null'} has no such setting; {others} has it"
    )


def _arguments_of_option(group: str, option: str, directory: Path) -> Sequence[str]:
    found = [
        each for where in (directory, packaged_directory()) if (each := where / group / f"{option}.yaml").is_file()
    ]
    body = OmegaConf.load(found[0])
    assert isinstance(body, DictConfig)
    return [*signature_of(import_target(body._target_, setting=f"{group}={option}")).parameters]


def _argument_of(config: DictConfig, key: str) -> _Argument | None:
    """Return the argument that takes the setting: of the component in which it is written, else of the first that follows it."""
    found = [
        _Argument(target=target, path=path, name=name, parameter=parameter, is_linked=join(above, name) != key)
        for above, node in components(config)
        for path in [value_at(node, "_target_")]
        for target in [import_target(path, setting=join(above, "_target_"))]
        for name, parameter in signature_at(above, node).parameters.items()
        if origin(config, join(above, name)) == key
    ]
    return min(found, key=lambda each: each.is_linked) if found else None


def _default(parameter: Parameter) -> Any:
    if parameter.default is REQUIRED:
        return None
    try:
        return plain(parameter.default)
    except TypeError:  # an object that no YAML can say
        return repr(parameter.default)


def _links_to(config: DictConfig, key: str) -> Iterator[str]:
    for above, node in containers(config):
        for name in entries(node):
            if link_of(child(node, name)) == key:
                yield join(above, name)


def _settings(config: DictConfig, key: str) -> dict[str, str]:
    node = find(config, key)
    is_component = "_target_" in entries(node)
    parameters = signature_at(key, node).parameters if is_component else {}
    found = {}
    for name in entries(node):
        if name == "_target_":
            continue
        link = link_of(child(node, name))
        value = value_at(config, join(key, name)) if link is None else f"${{{link}}}"
        kind = in_words(parameters[name].annotation) if name in parameters else type(value).__name__
        found[str(name)] = f"{in_yaml(value)} ({kind})"
    return found


def in_yaml(value: Any) -> str:
    """Return a value as one writes it: null, true, 0.1, [1, 2]; a component by its class."""
    if isinstance(value, Mapping) and "_target_" in value:
        return str(value["_target_"]).rpartition(".")[2]
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return "required" if value == "???" else str(value)


# -- where it was set ------------------------------------------------------------------------------------------------


def _set_in(config: DictConfig, key: str, chain: Sequence[ConfigFile], overrides: Sequence[str]) -> str:
    """Return the last place that says the value, in the order in which a config is composed."""
    given = {override.key for override in parse(overrides)}
    if any(f"{key}.".startswith(f"{origin(config, each)}.") for each in given if each != key.partition(".")[0]):
        return _COMMAND_LINE
    group = key.partition(".")[0]
    if group in given:
        choice = next(override.value for override in parse(overrides) if override.key == group)
        return _COMMAND_LINE if key == group else _in_option(key, str(choice), chain) or _CONSTRUCTOR
    for file in reversed(chain):
        if find(file.body, key) is not None:
            return _shown(file.path)
        if group in file.choices:
            return (
                _shown(file.path) if key == group else _in_option(key, str(file.choices[group]), chain) or _CONSTRUCTOR
            )
    return _CONSTRUCTOR


def _in_option(key: str, option: str, chain: Sequence[ConfigFile]) -> str | None:
    group, _, name = key.partition(".")
    for directory in (chain[-1].path.parent, packaged_directory()):
        path = directory / group / f"{option}.yaml"
        if path.is_file():
            body = OmegaConf.load(path)
            return _shown(path) if isinstance(body, DictConfig) and find(body, name) is not None else None
    return None


def _shown(path: Path) -> str:
    """A packaged file by its name in the package, any other by its path."""
    packaged = packaged_directory()
    return f"configs/{path.relative_to(packaged)}" if path.is_relative_to(packaged) else str(path)


# -- what is said of it ----------------------------------------------------------------------------------------------


def _about(key: str, chain: Sequence[ConfigFile], argument: _Argument | None, made: str | None) -> str:
    comments = [words for file in chain for words in [comments_of(file.path).get(key)] if words]
    described = _docstring(import_target(made, setting=key)) if made else ""
    if not described and argument is not None:
        target, name = argument.target, argument.name
        described = _entry(target, name) or _beside(target, name) or _docstring(target)
    return "\n\n".join([*comments[-1:], *([described] if described else [])])


def comments_of(path: Path) -> dict[str, str]:
    """Return what a config file says behind its settings (`seed: 0 # words`), by dotted key."""
    above: list[tuple[int, str]] = []  # the mappings in which a line stands, with their indentation
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        setting = re.match(r"( *)([A-Za-z_][\w-]*):(?: .*?)?(?: # (.+))?$", line)
        if setting is None:
            continue
        indentation = len(setting[1])
        above = [each for each in above if each[0] < indentation] + [(indentation, setting[2])]
        if setting[3]:
            found[".".join(name for _, name in above)] = setting[3].strip()
    return found


def _docstring(target: Callable[..., Any]) -> str:
    return inspect.getdoc(target) or ""


def _beside(target: Callable[..., Any], name: str) -> str:
    """Return the comment beside a field of this name, of the class or of one that it extends."""
    for each in inspect.getmro(target) if isinstance(target, type) else ():
        if name in vars(each).get("__annotations__", {}):
            found = re.search(rf"^    {name}: .*?  # (.+)$", inspect.getsource(each), re.MULTILINE)
            return found[1] if found else ""
    return ""


def _entry(target: Callable[..., Any], name: str) -> str:
    """Return what a docstring with a list of arguments (`name: words`, indented) says of this one."""
    constructor = inspect.getdoc(target.__init__) if isinstance(target, type) else None  # type: ignore[misc]
    for text in (_docstring(target), constructor or ""):
        found = re.search(rf"^( +){name}(?: \(.*\))?: (.*(?:\n(?:\1 +.*|(?=\n)))*)", text, re.MULTILINE)
        if found:
            return inspect.cleandoc(found[2])
    return ""
