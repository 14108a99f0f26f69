"""Does a value fit an annotation? The plain types are checked and converted; what cannot be judged passes."""

from __future__ import annotations

import collections.abc as abc
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rhymerl.config.targets import import_target
from rhymerl.config.tree import is_component
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
_NOT_JUDGED = (Any, object, type, abc.Callable, abc.Iterator, abc.Hashable)


class Misfit(Exception):  # noqa: N818 - not an error of the program's, and always turned into one that names the setting
    """`value` at `location` (such as `.weight` or `[0]`) within the judged value is not what `expected` says."""

    def __init__(self, value: Any, expected: str, *, location: str = "") -> None:
        super().__init__(f"{value!r}: expected {expected}")
        self.value = value
        self.expected = expected
        self.location = location


def fit(value: Any, annotation: Any) -> Any:
    """Return `value` as the annotation wants it: 1 becomes 1.0 for a float, text a Path, a list a tuple. Raises Misfit.

    A component may stand as its object or as its node, whose class is then compared.
    """
    kind, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if kind in (Union, UnionType):
        return _fit_union(value, annotation, arguments)
    if kind is Annotated:
        may_be_infinite = get_args(MaybeInfinite)[1] in arguments[1:]
        is_infinite = isinstance(value, float) and math.isinf(value)
        return value if may_be_infinite and is_infinite else fit(value, arguments[0])
    if kind is Literal:
        if any(type(choice) is type(value) and choice == value for choice in arguments):
            return value
        raise Misfit(value, in_words(annotation))
    if kind in _SCALARS:
        return _fit_scalar(value, kind)
    if kind in _MAPPINGS:
        if not isinstance(value, Mapping):
            raise Misfit(value, "mapping")
        of_key, of_value = arguments or (Any, Any)
        return {fit(key, of_key): _fit_inside(item, of_value, f".{key}") for key, item in value.items()}
    if kind in _SEQUENCES:
        return _fit_sequence(value, annotation, kind, arguments)
    return _fit_class(value, kind) if _is_class(kind) else value


def wants_component(text: str, annotation: Any) -> bool:
    """Return whether a component may stand here, and this text itself not."""
    if not any(map(_is_class, _members(annotation))):
        return False
    try:
        fit(text, annotation)
    except Misfit:
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
    if not isinstance(kind, type) or kind in _SCALARS or kind in _MAPPINGS or kind in _SEQUENCES:
        return False
    return kind not in _NOT_JUDGED and not getattr(kind, "_is_protocol", False)


def _fit_scalar(value: Any, kind: Any) -> Any:
    """Return a scalar as `kind`; raise Misfit if it is none.

    1e4 and text such as an environment variable's are whole numbers; YAML takes 1e-4 for text; a name may look like a
    number.
    """
    types, expected = _SCALARS[kind]
    is_fraction = kind is int and isinstance(value, float) and not value.is_integer()
    if not isinstance(value, types) or is_fraction or (isinstance(value, bool) and kind is not bool):
        raise Misfit(value, expected)
    if kind is NoneType:
        return None
    try:
        fitted = kind(value)
    except ValueError:
        raise Misfit(value, expected) from None
    if kind is float and not math.isfinite(fitted):  # YAML takes 1e400 for infinity
        raise Misfit(fitted, "a finite number")
    return fitted


def _fit_union(value: Any, annotation: Any, members: tuple[Any, ...]) -> Any:
    """Return the first member that takes the value as it is, else the first that can convert it."""
    classes = tuple(member for member in members if _is_class(member))
    converted: list[Any] = []
    misfits: list[Misfit] = []
    for member in classes if is_component(value) and classes else members:
        try:
            fitted = fit(value, member)
        except Misfit as misfit:
            misfits.append(misfit)
            continue
        if type(fitted) is type(value):
            return fitted
        converted.append(fitted)
    if converted:
        return converted[0]
    inner = misfits[0] if len(misfits) == 1 else next((misfit for misfit in misfits if misfit.location), None)
    raise inner or Misfit(value, in_words(annotation))


def _fit_sequence(value: Any, annotation: Any, kind: Any, arguments: tuple[Any, ...]) -> Any:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, abc.Iterable):
        raise Misfit(value, in_words(annotation))
    items = list(value)
    each = [arguments[0] if arguments else Any] * len(items)
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(items) != len(arguments):
            raise Misfit(value, f"list of {len(arguments)} values")
        each = list(arguments)
    fitted = [_fit_inside(item, of, f"[{i}]") for i, (item, of) in enumerate(zip(items, each, strict=True))]
    return _SEQUENCES[kind](fitted)


def _fit_inside(value: Any, annotation: Any, location: str) -> Any:
    try:
        return fit(value, annotation)
    except Misfit as misfit:
        raise Misfit(misfit.value, misfit.expected, location=location + misfit.location) from None


def _fit_class(value: Any, kind: type) -> Any:
    if not is_component(value):
        if isinstance(value, kind):
            return value
        raise Misfit(value, in_words(kind))
    target = import_target(value["_target_"], setting="_target_")
    if isinstance(target, type) and not issubclass(target, kind):
        raise Misfit(value["_target_"], f"{_one_of(kind)}, which {target.__name__} is not")
    return value
