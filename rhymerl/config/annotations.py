"""Does a value fit an annotation? The plain types are checked and converted; what cannot be judged passes."""

from __future__ import annotations

import collections.abc as abc
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rhymerl.config.targets import import_target
from rhymerl.types import MaybeInfinite

_MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)
_SEQUENCES: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
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


def is_component(value: object) -> bool:
    """Return whether this is a node that names its class."""
    return isinstance(value, Mapping) and "_target_" in value


def fit(value: Any, annotation: Any) -> Any:
    """Return `value` as the annotation wants it: 1 becomes 1.0 for a float, text a Path, a list a tuple. Raises Misfit.

    A component may stand as its object or as its node, whose class is then compared.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return _fit_union(value, annotation, arguments)
    if origin is Annotated:
        may_be_infinite = get_args(MaybeInfinite)[1] in arguments[1:]
        is_infinite = isinstance(value, float) and math.isinf(value)
        return value if may_be_infinite and is_infinite else fit(value, arguments[0])
    if origin is Literal:
        return _fit_literal(value, arguments)
    kind = origin or annotation
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    if kind in _MAPPINGS:
        return _fit_mapping(value, arguments)
    if kind in _SEQUENCES:
        return _fit_sequence(value, kind, arguments)
    return _fit_class(value, kind) if _is_class(kind) else value


def wants_component(text: str, annotation: Any) -> bool:
    """Return whether a component may stand here, and this text itself not."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if not any(map(_is_class, members)):
        return False
    try:
        fit(text, annotation)
    except Misfit:
        return True
    return False


def is_free_form(annotation: Any) -> bool:
    """Return whether a mapping with keys of the user's own may stand here."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return is_free_form(get_args(annotation)[0])
    if origin in (Union, UnionType):
        members = get_args(annotation)
        return any(map(is_free_form, members)) and not any(map(_is_class, members))
    return annotation is Any or (origin or annotation) in _MAPPINGS


def in_words(annotation: Any) -> str:
    """`int`, `one of linear, cosine`, `list of float or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(in_words(each) for each in [*(a for a in arguments if a is not NoneType), *_null(arguments)])
    if origin is Annotated:
        return in_words(arguments[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    kind = origin or annotation
    if kind is NoneType:
        return "null"
    if kind in _MAPPINGS:
        return "mapping"
    if kind in _SEQUENCES:
        return f"list of {in_words(arguments[0])}" if arguments and arguments[0] is not Any else "list"
    if _is_class(kind):
        return f"a {kind.__name__} (a mapping whose _target_ names its class)"
    return getattr(kind, "__name__", str(kind))


def _null(arguments: tuple[Any, ...]) -> list[Any]:
    return [NoneType] if NoneType in arguments else []


def _is_class(kind: Any) -> bool:
    """Return whether only objects of a class of its own fit: a component."""
    if not isinstance(kind, type) or kind in _SCALARS or kind in _MAPPINGS or kind in _SEQUENCES:
        return False
    return kind not in _NOT_JUDGED and not getattr(kind, "_is_protocol", False)


def _fit_union(value: Any, annotation: Any, members: tuple[Any, ...]) -> Any:
    """Return the first member that takes the value as it is, else the first that can convert it."""
    classes = [member for member in members if _is_class(member)]
    if is_component(value) and classes:
        members = tuple(classes)
    converted: list[Any] = []
    misfits: list[Misfit] = []
    for member in members:
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


def _fit_literal(value: Any, allowed: tuple[Any, ...]) -> Any:
    for choice in allowed:
        if type(choice) is type(value) and choice == value:
            return choice
    raise Misfit(value, in_words(Literal[allowed]))


def _fit_mapping(value: Any, arguments: tuple[Any, ...]) -> Any:
    if not isinstance(value, Mapping):
        raise Misfit(value, "mapping")
    of_key, of_value = arguments or (Any, Any)
    return {fit(key, of_key): _fit_inside(item, of_value, f".{key}") for key, item in value.items()}


def _fit_sequence(value: Any, kind: Any, arguments: tuple[Any, ...]) -> Any:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, abc.Iterable):
        raise Misfit(value, in_words(kind[arguments] if arguments else kind))
    items = list(value)
    each = [arguments[0] if arguments else Any] * len(items)
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(items) != len(arguments):
            raise Misfit(value, f"list of {len(arguments)} values")
        each = list(arguments)
    return _SEQUENCES[kind](
        [_fit_inside(item, of, f"[{i}]") for i, (item, of) in enumerate(zip(items, each, strict=True))]
    )


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
        raise Misfit(value["_target_"], f"a {kind.__name__}, which {target.__name__} is not")
    return value


def _fit_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Misfit(value, "bool (true or false)")
    return value


def _fit_int(value: Any) -> int:
    """1e4 and text such as an environment variable's are whole numbers too."""
    if isinstance(value, bool):
        raise Misfit(value, "int")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    fitted: int = _parse(value, int, "int")
    return fitted


def _fit_float(value: Any) -> float:
    """YAML takes 1e-4 for text, and 1e400 for infinity."""
    if isinstance(value, bool):
        raise Misfit(value, "float")
    fitted: float = value if isinstance(value, float) else _parse(value, float, "float")
    if not math.isfinite(fitted):
        raise Misfit(value, "a finite number")
    return fitted


def _parse(value: Any, kind: Callable[[Any], Any], words: str) -> Any:
    if isinstance(value, int | str):
        try:
            return kind(value)
        except ValueError:
            pass
    raise Misfit(value, words)


def _fit_str(value: Any) -> str:
    """A name may look like a number: `run_dir=7`."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Misfit(value, "str")
    return str(value)


def _fit_path(value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise Misfit(value, "path")
    return Path(value)


def _fit_null(value: Any) -> None:
    if value is not None:
        raise Misfit(value, "null")


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    bool: _fit_bool,
    int: _fit_int,
    float: _fit_float,
    str: _fit_str,
    Path: _fit_path,
    NoneType: _fit_null,
}
