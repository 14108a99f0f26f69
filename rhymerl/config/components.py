"""Components from settings, and settings from components."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import PurePath
from types import FunctionType
from typing import Any, TypeVar

from rhymerl.config.annotations import fit
from rhymerl.config.targets import REQUIRED, Signature, import_target, signature_of
from rhymerl.config.tree import is_component, join, origin
from rhymerl.errors import ConfigError, did_you_mean

T = TypeVar("T")


def instantiate(
    node: object, *, key: str = "", default: Callable[[], Any] | None = None, kind: type | None = None
) -> Any:
    """Build the object that `node` describes; None is a `default`.

    Every mapping with a `_target_` is built, inner ones first, in lists and mappings too. Anything else, such as an
    object already built, is returned as it is. Raises ConfigError naming the setting whose value is wrong, also for a
    ValueError or TypeError of the constructor. `key` is where the node stands, for these errors; a node of a composed
    config knows it. Also raises it for what is no `kind`.
    """
    found = default() if node is None and default is not None else _build(node, key, {})
    if kind is not None and not isinstance(found, kind):
        raise ConfigError(
            f"{key}: expected a subclass of rhymerl.{kind.__name__}, and {type(found).__qualname__} is none"
        )
    return found


def _build(node: object, key: str, config: Mapping[str, Any]) -> Any:
    """Build a node without links, which stands at `key` of a config; outside one, {}, text may name the environment."""
    if isinstance(node, Mapping | Sequence) and not isinstance(node, dict | list | tuple | str | bytes):
        from rhymerl.config.interpolation import opened

        node, key, config = opened(node, key)
    if isinstance(node, str) and "${oc.env:" in node and not config:  # a checkpoint's
        from rhymerl.config.interpolation import evaluate

        return evaluate(node, {}, key)
    if isinstance(node, Mapping):
        values = {name: _build(value, join(key, name), config) for name, value in node.items()}
        return _construct(values, key, config) if is_component(values) else values
    if isinstance(node, list | tuple):
        items = [_build(item, join(key, index), config) for index, item in enumerate(node)]
        return tuple(items) if isinstance(node, tuple) else items
    return node


def _construct(values: dict[str, Any], key: str, config: Mapping[str, Any]) -> Any:
    key = origin(config, key)
    path = values.pop("_target_")
    target = import_target(path, setting=join(key, "_target_"))
    signature = signature_of(target)
    arguments = {name: _fitted(value, name, key, signature, config) for name, value in values.items()}
    for name, parameter in signature.parameters.items():
        if parameter.default is REQUIRED and name not in arguments:
            raise ConfigError(f"{join(key, name)}: required by {path}, but not set")
    return construct(target, arguments, key=key, config=config)


def construct(
    target: Callable[..., T], arguments: Mapping[str, Any], *, key: str, config: Mapping[str, Any] | None = None
) -> T:
    """Return `target(**arguments)` for settings at `key` ("" is the top of a config), or where links of `config` lead.

    A constructor names only its own argument in a ValueError or TypeError; here that becomes a ConfigError which names
    the setting.
    """
    _refuse_abstract(target, key)
    try:
        return target(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(_located(str(error), key, target, config or {})) from error


def _refuse_abstract(target: Any, key: str) -> None:
    """Raise ConfigError for a class that lacks a method which its base class asks for."""
    if inspect.isabstract(target):
        missing = [f"`{name}`" for name in sorted(target.__abstractmethods__)]
        methods, are = ("method", "is") if len(missing) == 1 else ("methods", "are")
        raise ConfigError(
            f"{key or 'the class'}={_path(target)}: it has no {methods} {', '.join(missing)}, which {are} required"
        )


def _located(message: str, key: str, target: Callable[..., Any], config: Mapping[str, Any]) -> str:
    """A constructor's words in one line, behind `key`: as part of its path where they begin with an argument."""
    message = " ".join(message.split())
    for name in signature_of(target).parameters:
        if message.startswith(tuple(name + mark for mark in "=.[:")):
            return origin(config, join(key, name)) + message.removeprefix(name)
    return f"{key or getattr(target, '__qualname__', target)}: {message}"


def _fitted(value: Any, name: str, key: str, signature: Signature, config: Mapping[str, Any]) -> Any:
    setting = origin(config, join(key, name))
    if name not in signature.parameters:
        if signature.is_open:
            return value
        raise ConfigError(f"unknown setting {join(key, name)}{did_you_mean(name, signature.parameters)}")
    if isinstance(value, str) and value == "???":
        raise ConfigError(f"{setting}: required, but not set")
    return fit(value, signature.parameters[name].annotation, setting)


def describe(component: object) -> dict[str, Any]:
    """Return the plain containers from which `instantiate` builds the like of `component`.

    Raises TypeError when an argument of its constructor is not kept as an attribute of the same name.
    """
    kind = type(component)
    signature = signature_of(kind)
    if signature.is_open:
        raise TypeError(f"{_path(kind)} takes **kwargs, so its settings cannot be told; {_CONVENTION}")
    described = {"_target_": _path(kind)}
    for name in signature.parameters:
        if not hasattr(component, name):
            raise TypeError(f"{_path(kind)} has no attribute {name!r}; {_CONVENTION}")
        described[name] = plain(getattr(component, name))
    return described


_CONVENTION = "a component takes named arguments only and keeps each as an attribute of the same name"


def plain(value: Any) -> Any:
    """Return `value` in plain containers; components become nodes, functions their dotted names. Raises TypeError."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # numpy has a class of its own for strings and numbers
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value))
    if isinstance(value, FunctionType | type):
        return _path(value)
    return describe(value)


def _path(named: FunctionType | type) -> str:
    if "<" in named.__qualname__:
        raise TypeError(f"{named.__qualname__} cannot be named in a config: it is not at the top of a module")
    return f"{named.__module__}.{named.__qualname__}"
