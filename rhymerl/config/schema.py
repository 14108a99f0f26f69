"""The schema of a config: constructors for components, the packaged file for all else."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig

from rhymerl.config.annotations import Misfit, fit, is_free_form, wants_component
from rhymerl.config.components import plain
from rhymerl.config.nodes import (
    child,
    components,
    containers,
    entries,
    find,
    join,
    link_of,
    origin,
    value_at,
)
from rhymerl.config.targets import REQUIRED, Parameter, Signature, import_target, is_dotted_path, signature_of
from rhymerl.errors import ConfigError

_MISSING = "???"
_NOTHING: Any = object()
_STOP = "there are no stop strings; rollout.stop_token_ids ends answers by tokens"
_ELSEWHERE = {
    "rollout.stop": _STOP,
    "rollout.stop_strings": _STOP,
}  # settings that others have, and what is here instead


def signature_at(key: str, node: DictConfig) -> Signature:
    """Return the arguments of the class that a node names."""
    setting = join(key, "_target_")
    return signature_of(import_target(value_at(node, "_target_"), setting=setting))


def expand(config: DictConfig) -> None:
    """Write the default of every argument into the nodes that leave it out.

    A dotted class path where only a component fits (`trainer.logger=my_module.MyLogger`) becomes one.
    """
    for key, node in components(config):
        for name, parameter in signature_at(key, node).parameters.items():
            default = _plain_default(parameter)
            if name not in entries(node) and default is not _NOTHING:
                node[name] = default
            value = child(node, name)._value() if name in entries(node) else None
            if isinstance(value, str) and is_dotted_path(value) and wants_component(value, parameter.annotation):
                node[name] = {"_target_": value}


def _plain_default(parameter: Parameter) -> Any:
    if parameter.default is REQUIRED:
        return _MISSING
    try:
        return plain(parameter.default)
    except TypeError:  # an object that no YAML can say; it stays the constructor's own
        return _NOTHING


def check(config: DictConfig, root: DictConfig) -> None:
    """Raise ConfigError for the first unknown setting, then for the first value of a wrong type; convert the others.

    `root` is the packaged config that this one builds on: the schema of everything that is not a component.
    """
    kinds = kinds_by_key(config)
    closed = _closed(root, kinds)
    _check_names(config, root, closed)
    _check_links(config)
    for key, each in (_kinds_of_root(root, closed) | kinds).items():
        for kind in each:
            _check_type(config, key, kind)


def _kinds_of_root(root: DictConfig, closed: list[str]) -> dict[str, list[Any]]:
    """A setting that no constructor takes has the type of its packaged value."""
    nodes = {join(key, name): find(root, join(key, name)) for key in closed for name in entries(find(root, key))}
    kinds = {key: type(node._value()) for key, node in nodes.items() if link_of(node) is None}
    return {key: [kind] for key, kind in kinds.items() if kind in (bool, int, float, str)}


def _check_links(config: DictConfig) -> None:
    for key, node in containers(config):
        for name in entries(node):
            link = link_of(child(node, name))
            if link is not None and find(config, origin(config, join(key, name))) is None:
                missing = str(unknown(config, link))
                raise ConfigError(f"{join(key, name)}='${{{link}}}': {missing}")


def kinds_by_key(config: DictConfig) -> dict[str, list[Any]]:
    """Return what the constructors expect, by the place where the value is written."""
    found: dict[str, list[Any]] = {}
    for key, node in components(config):
        for name, parameter in signature_at(key, node).parameters.items():
            found.setdefault(origin(config, join(key, name)), []).append(parameter.annotation)
    return found


def _closed(root: DictConfig, kinds: dict[str, list[Any]]) -> list[str]:
    """Return the plain mappings whose keys are fixed: those of the root, but for free-form ones and what is in components."""
    inside = [key for key, _ in components(root)]
    inside += [key for key, each in kinds.items() if any(map(is_free_form, each))]
    return [
        key
        for key, node in containers(root)
        if isinstance(node, DictConfig) and entries(node) and not any(f"{key}.".startswith(f"{it}.") for it in inside)
    ]


def _check_names(config: DictConfig, root: DictConfig, closed: list[str]) -> None:
    for key in closed:
        node = find(config, key)
        if not isinstance(node, DictConfig) or "_target_" in entries(node):
            continue
        for name in entries(node):
            if name not in entries(find(root, key)):
                raise unknown(config, join(key, name))
        for name in entries(find(root, key)):
            if name not in entries(node):
                raise ConfigError(f"{join(key, name)}: cannot be removed; set it to null")
    for key, node in components(config):
        signature = signature_at(key, node)
        for name in entries(node):
            if name not in signature.parameters and name != "_target_" and not signature.is_open:
                raise unknown(config, join(key, name))


def unknown(config: DictConfig, key: str) -> ConfigError:
    """Return the error for a key that nothing knows, with the nearest one that is known."""
    known = [
        join(above, name)
        for above, node in containers(config)
        for name in entries(node)
        if name != "_target_" and not f"{join(above, name)}.".startswith(f"{key}.")
    ]
    if key in _ELSEWHERE:
        return ConfigError(f"unknown setting {key}: {_ELSEWHERE[key]}")
    node = find(config, key)
    while isinstance(node, DictConfig) and len(entries(node)) == 1:  # an override made the mappings on its way
        key = join(key, entries(node)[0])
        node = find(config, key)
    near = _nearest(key, known)
    return ConfigError(f"unknown setting {key}" + (f"; did you mean {near}?" if near else ""))


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """A key with the same last name first, then a sibling, then any."""
    parent, _, name = key.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == parent}
    same_name = [each for each in known if each.rpartition(".")[2] == name]
    close = get_close_matches(key, same_name, n=1, cutoff=0)
    close += [siblings[each] for each in get_close_matches(name, siblings, n=1)]
    close += get_close_matches(key, known, n=1)
    return close[0] if close else None


def _check_type(config: DictConfig, key: str, annotation: Any) -> None:
    node = find(config, key)
    if node is None or link_of(node) is not None:
        return
    value = value_at(config, key)
    if value == _MISSING:
        return
    try:
        fitted = fit(value, annotation)
    except Misfit as misfit:
        raise ConfigError(f"{key}{misfit.location}={misfit}") from None
    if isinstance(fitted, bool | int | float | str) and type(fitted) is not type(value):
        above, _, name = key.rpartition(".")
        find(config, above)[name] = fitted
