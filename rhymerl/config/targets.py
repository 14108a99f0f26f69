"""The objects that `_target_` names: an importable class or function, and the arguments it takes."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import sys
import typing
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from rhymerl.config.dotted_names import find, is_dotted
from rhymerl.errors import ConfigError
from rhymerl.types import MaybeInfinite

REQUIRED: Any = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The arguments that can be given by name, each with its annotation (Any where it cannot be told) and its default.

    `is_open` when `**kwargs` takes any others.
    """

    parameters: Mapping[str, inspect.Parameter]
    is_open: bool


def import_target(path: Any, *, setting: str) -> Callable[..., Any]:
    """Return the class or function called `path`; modules in the current directory count, after all installed ones.

    Raises ConfigError naming `setting` when there is no such thing.
    """
    where = f"{setting}={path!r}"
    if not isinstance(path, str) or not is_dotted(path):
        raise ConfigError(f"{where}: expected a dotted class path such as my_module.MyClass")
    look_in_current_directory()
    found = find(path, where=where, error=ConfigError).target
    if not callable(found):
        raise ConfigError(f"{where}: expected a class or a function, it is a {type(found).__name__}")
    return typing.cast(Callable[..., Any], found)


def look_in_current_directory() -> None:
    """Let its modules be imported, last of all, so that no file there stands in for an installed one.

    It stays, since processes that are spawned later import the same names.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def signature_of(target: Callable[..., Any]) -> Signature:
    """Return the arguments of a class's constructor or of a function."""
    try:
        found = inspect.signature(target).parameters.values()
    except ValueError:  # some builtins have none
        return Signature(parameters={}, is_open=True)
    named = [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Signature(
        parameters={p.name: _parameter(target, p) for p in named},
        is_open=any(p.kind is p.VAR_KEYWORD for p in found),
    )


def _parameter(target: Callable[..., Any], found: inspect.Parameter) -> inspect.Parameter:
    """Return the parameter, its default also where a dataclass's factory makes it, which signatures hide.

    Where None or infinity is the default, it may be given.
    """
    annotation, default = _resolve(found.annotation, _namespace(target, found.name)), found.default
    field = getattr(target, "__dataclass_fields__", {}).get(found.name)
    if field is not None and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if default is None:
        annotation = annotation | None if annotation is not Any else Any
    if isinstance(default, float) and math.isinf(default):
        annotation = typing.Annotated[annotation, *typing.get_args(MaybeInfinite)[1:]]
    return found.replace(annotation=annotation, default=default)


def _namespace(target: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the namespace of an argument's annotation: a dataclass inherits fields from other modules."""
    owner: Any = target
    if isinstance(target, type):
        owner = next(kind for kind in target.__mro__ if "__init__" in vars(kind))
        fields = vars(owner).get("__dataclass_fields__", {})
        owner = next(
            (kind for kind in owner.__mro__ if name in fields and name in inspect.get_annotations(kind)), owner
        )
    return vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}


def _resolve(annotation: Any, namespace: dict[str, Any]) -> Any:
    if annotation is inspect.Parameter.empty:
        return Any
    try:
        holder = SimpleNamespace(__annotations__={"it": annotation})
        return typing.get_type_hints(holder, namespace, include_extras=True)["it"]
    except (NameError, AttributeError, TypeError):  # names imported for type checkers only
        return Any
