"""Does a value fit an annotation? The plain types are checked and converted; what cannot be judged passes."""

from __future__ import annotations

import collections.abc as abc
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rhymerl.config.dotted_names import is_dotted
from rhymerl.config.targets import import_target
from rhymerl.config.tree import is_component, join
from rhymerl.errors import ConfigError
from rhymerl.types import MaybeInfinite

_SCALARS: dict[Any, tuple[tuple[type, ...], str]] = {  # the types of values that may fit, and what is expected
    bool: ((bool,), "bool (true or false)"),
    int: ((int, float, str), "int"),
    float: ((float, int, str), "float"),
    str: ((str, int), "str"),
    Path: ((str, Path), "path"),
    NoneType: ((NoneType,), "null"),
}
_MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)
_SEQUENCES: dict[Any, Callable[[list[Any]], Any]] = {
    **{kind: kind for kind in (list, tuple, set, frozenset)},
    **dict.fromkeys((abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection), list),
    **dict.fromkeys((abc.Set, abc.MutableSet), set),
}
_NO_CLASSES = (*_SCALARS, *_MAPPINGS, *_SEQUENCES, Any, object, type, abc.Callable, abc.Iterator, abc.Hashable)


def fit(value: Any, annotation: Any, setting: str) -> Any:
    """Return `value` as the annotation wants it: 1 becomes 1.0 for a float, text a Path, a list a tuple.

    A component may stand as its object or as its node, whose class is then compared. Raises ConfigError, which begins
    with the place of what does not fit: the setting, or in it such as `.weight` or `[0]`.
    """
    kind, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if kind in (Union, UnionType):
        return _fit_union(value, annotation, arguments, setting)
    if kind is Annotated:
        may_be_infinite = get_args(MaybeInfinite)[1] in arguments[1:]
        is_infinite = isinstance(value, float) and math.isinf(value)
        return value if may_be_infinite and is_infinite else fit(value, arguments[0], setting)
    if kind is Literal:
        if any(type(choice) is type(value) and choice == value for choice in arguments):
            return value
        raise _misfit(value, in_words(annotation), setting)
    if kind in _SCALARS:
        return _fit_scalar(value, kind, setting)
    if kind in _MAPPINGS:
        if not isinstance(value, Mapping):
            raise _misfit(value, "mapping", setting)
        of_key, of_value = arguments or (Any, Any)
        return {fit(key, of_key, setting): fit(item, of_value, f"{setting}.{key}") for key, item in value.items()}
    if kind in _SEQUENCES:
        return _fit_sequence(value, annotation, kind, arguments, setting)
    return _fit_class(value, kind, setting) if _is_class(kind) else value


def _misfit(value: Any, expected: str, setting: str) -> ConfigError:
    return ConfigError(f"{setting}={value!r}: expected {expected}")


def stands_for_component(value: Any, annotation: Any) -> bool:
    """Return whether this is a class path where a component may stand, and the text itself not."""
    is_path = isinstance(value, str) and is_dotted(value)
    if not is_path or not any(map(_is_class, _members(annotation))):
        return False
    try:
        fit(value, annotation, "")
    except ConfigError:
        return True
    return False


def is_free_form(annotation: Any) -> bool:
    """Return whether a mapping with keys of the user's own may stand here."""
    members = _members(annotation)
    is_mapping = any(member is Any or (get_origin(member) or member) in _MAPPINGS for member in members)
    return is_mapping and not any(map(_is_class, members))


def in_words(annotation: Any) -> str:
    """`int`, `one of linear, cosine`, `list of float or null`."""
    kind, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if kind in (Union, UnionType):
        return " or ".join(map(in_words, sorted(arguments, key=lambda member: member is NoneType)))
    if kind is Annotated:
        return in_words(arguments[0])
    if kind is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if kind is NoneType:
        return "null"
    if kind in _MAPPINGS:
        return "mapping"
    if kind in _SEQUENCES:
        return f"list of {in_words(arguments[0])}" if arguments and arguments[0] is not Any else "list"
    if _is_class(kind):
        return f"{_one_of(kind)} (a mapping whose _target_ names its class)"
    return getattr(kind, "__name__", str(kind))


def _one_of(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return what may stand here, one annotation each."""
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _members(arguments[0])
    return arguments if kind in (Union, UnionType) else (annotation,)


def _is_class(kind: Any) -> bool:
    """Return whether only objects of a class of its own fit: a component."""
    return isinstance(kind, type) and kind not in _NO_CLASSES and not getattr(kind, "_is_protocol", False)


def _fit_scalar(value: Any, kind: Any, setting: str) -> Any:
    """Return a scalar as `kind`; raise ConfigError if it is none.

    1e4 and text such as an environment variable's are whole numbers; YAML takes 1e-4 for text; a name may look like a
    number.
    """
    types, expected = _SCALARS[kind]
    is_fraction = kind is int and isinstance(value, float) and not value.is_integer()
    if not isinstance(value, types) or is_fraction or (isinstance(value, bool) and kind is not bool):
        raise _misfit(value, expected, setting)
    if kind is NoneType:
        return None
    try:
        fitted = kind(value)
    except ValueError:
        raise _misfit(value, expected, setting) from None
    if kind is float and not math.isfinite(fitted):  # YAML takes 1e400 for infinity
        raise _misfit(fitted, "a finite number", setting)
    return fitted


def _fit_union(value: Any, annotation: Any, members: tuple[Any, ...], setting: str) -> Any:
    """Return the first member that takes the value as it is, else the first that can convert it."""
    classes = tuple(member for member in members if _is_class(member))
    converted: list[Any] = []
    errors: list[ConfigError] = []
    for member in classes if is_component(value) and classes else members:
        try:
            fitted = fit(value, member, setting)
        except ConfigError as error:
            errors.append(error)
            continue
        if type(fitted) is type(value):
            return fitted
        converted.append(fitted)
    if converted:
        return converted[0]
    inside = [error for error in errors if len(errors) == 1 or not str(error).startswith(f"{setting}=")]
    raise inside[0] if inside else _misfit(value, in_words(annotation), setting)


def _fit_sequence(value: Any, annotation: Any, kind: Any, arguments: tuple[Any, ...], setting: str) -> Any:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, abc.Iterable):
        raise _misfit(value, in_words(annotation), setting)
    items = list(value)
    each = [arguments[0] if arguments else Any] * len(items)
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(items) != len(arguments):
            raise _misfit(value, f"list of {len(arguments)} values", setting)
        each = list(arguments)
    fitted = [fit(item, of, f"{setting}[{index}]") for index, (item, of) in enumerate(zip(items, each, strict=True))]
    return _SEQUENCES[kind](fitted)


def _fit_class(value: Any, kind: type, setting: str) -> Any:
    if not is_component(value):
        if isinstance(value, kind):
            return value
        raise _misfit(value, in_words(kind), setting)
    target = import_target(value["_target_"], setting=join(setting, "_target_"))
    if isinstance(target, type) and not issubclass(target, kind):
        raise _misfit(value["_target_"], f"{_one_of(kind)}, which {target.__name__} is not", setting)
    return value
