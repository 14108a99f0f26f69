"""The schema of a config: constructors for components, the packaged file for all else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rhymerl.config import other_names
from rhymerl.config.annotations import fit, is_free_form, stands_for_component
from rhymerl.config.components import plain
from rhymerl.config.interpolation import evaluate, value_at
from rhymerl.config.targets import REQUIRED, Signature, import_target, signature_of
from rhymerl.config.tree import ABSENT, entries, find, is_component, join, link_of, origin, walk
from rhymerl.errors import ConfigError

_MISSING = "???"
_ELSEWHERE = dict.fromkeys(  # settings that others have, and what is here instead
    ("rollout.stop", "rollout.stop_strings"),
    "there are no stop strings; rollout.stop_token_ids ends answers by tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A node that names its class, and the arguments which that takes."""

    key: str
    node: dict[Any, Any]
    path: str
    target: Callable[..., Any]
    signature: Signature


def classes(config: dict[str, Any]) -> Iterator[Component]:
    """Yield every component, outer ones first. Raises ConfigError for a class that cannot be imported."""
    for key, node in walk(config):
        if is_component(node):
            path = evaluate(node["_target_"], config, setting := join(key, "_target_"))
            target = import_target(path, setting=setting)
            yield Component(key=key, node=node, path=path, target=target, signature=signature_of(target))


def expand(config: dict[str, Any]) -> None:
    """Write the default of every argument into the nodes that leave it out.

    A dotted class path where only a component fits (`trainer.logger=my_module.MyLogger`) becomes one.
    """
    for each in classes(config):
        for name, parameter in each.signature.parameters.items():
            default = plain_default(parameter)
            if name not in each.node and default is not ABSENT:
                each.node[name] = default
            if stands_for_component(value := each.node.get(name), parameter.annotation):
                each.node[name] = {"_target_": value}


def plain_default(parameter: inspect.Parameter) -> Any:
    """Return an argument's default as a config says it: `???` if there is none, ABSENT if YAML cannot say it."""
    if parameter.default is REQUIRED:
        return _MISSING
    try:
        return plain(parameter.default)
    except TypeError:  # it stays the constructor's own
        return ABSENT


def kinds_by_key(config: dict[str, Any]) -> dict[str, list[Any]]:
    """Return what the constructors expect, by the place where the value is written."""
    found: dict[str, list[Any]] = {}
    for each in classes(config):
        for name, parameter in each.signature.parameters.items():
            found.setdefault(origin(config, join(each.key, name)), []).append(parameter.annotation)
    return found


def check(config: dict[str, Any], root: dict[str, Any]) -> None:
    """Raise ConfigError for the first unknown setting, then for the first value of a wrong type; convert the others.

    `root` is the packaged config that this one builds on: the schema of everything that is not a component.
    """
    kinds = kinds_by_key(config)
    closed = dict(_closed(root, kinds))
    _check_names(config, closed)
    for key, value in walk(config):
        link = link_of(value)
        if link is not None and find(config, origin(config, key)) is ABSENT:
            raise ConfigError(f"{key}='${{{link}}}': {unknown(config, link)}")
    for above, node in closed.items():  # a setting that no constructor takes has the type of its packaged value
        for name, value in node.items():
            if link_of(value) is None and type(value) in (bool, int, float, str):
                kinds.setdefault(join(above, name), [type(value)])
    for key, wanted in kinds.items():
        for annotation in wanted:
            _check_type(config, key, annotation)


def _closed(root: Any, kinds: dict[str, list[Any]], key: str = "") -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield the plain mappings with fixed keys: the root's, except free-form ones and the contents of components."""
    if is_component(root) or any(map(is_free_form, kinds.get(key, ()))):
        return
    if isinstance(root, dict) and root:
        yield key, root
    for name, value in entries(root):
        yield from _closed(value, kinds, join(key, name))


def _check_names(config: dict[str, Any], closed: dict[str, dict[Any, Any]]) -> None:
    for key, known in closed.items():
        node = find(config, key)
        if not isinstance(node, dict) or is_component(node):
            continue
        for name in [*node, *known]:
            if name not in known:
                raise unknown(config, join(key, name))
            if name not in node:
                raise ConfigError(f"{join(key, name)}: cannot be removed; set it to null")
    for each in classes(config):
        for name in each.node:
            if name not in each.signature.parameters and name != "_target_" and not each.signature.is_open:
                raise unknown(config, join(each.key, name))


def _check_type(config: dict[str, Any], key: str, annotation: Any) -> None:
    node = find(config, key)
    if node is ABSENT or link_of(node) is not None:
        return
    value = value_at(config, key)
    if value == _MISSING:
        return
    fitted = fit(value, annotation, key)
    if isinstance(fitted, bool | int | float | str) and type(fitted) is not type(value):
        above, _, name = key.rpartition(".")
        find(config, above)[name] = fitted


def unknown(config: dict[str, Any], key: str) -> ConfigError:
    """Return the error for a key that nothing knows, with the nearest one that is known."""
    if key in _ELSEWHERE:
        return ConfigError(f"unknown setting {key}: {_ELSEWHERE[key]}")
    settings = (each for each, _ in walk(config) if each and each.rpartition(".")[2] != "_target_")
    known = [each for each in settings if not f"{each}.".startswith(f"{key}.")]
    node = find(config, key)
    while isinstance(node, dict) and len(node) == 1:  # an override made the mappings on its way
        ((name, node),) = node.items()
        key = join(key, name)
    if ours := other_names.here(key):
        return ConfigError(f"unknown setting {key}; it is {ours} here")
    near = _nearest(key, known)
    return ConfigError(f"unknown setting {key}" + (f"; did you mean {near}?" if near else ""))


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """Return the nearest key: one with the same last name first, then a sibling, then any."""
    parent, _, name = key.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == parent}
    same_name = [each for each in known if each.rpartition(".")[2] == name]
    close = get_close_matches(key, same_name, n=1, cutoff=0)
    close += [siblings[each] for each in get_close_matches(name, siblings, n=1)]
    close += get_close_matches(key, known, n=1)
    return close[0] if close else None
