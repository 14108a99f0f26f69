"""Objects that tests may hand to an answer: one that can call any of theirs can make it say anything."""

from __future__ import annotations

import sys
from functools import reduce
from importlib import import_module
from types import BuiltinMethodType, FunctionType, MethodDescriptorType, MethodType, WrapperDescriptorType
from typing import Any

TESTS_FILE = "tests.py"  # where the code of the tests says that it is from
_IMPORTED = (type, FunctionType, BuiltinMethodType, MethodDescriptorType, WrapperDescriptorType)
_CONTAINERS = (list, dict, set, bytearray)


class UnfitError(TypeError):
    """Tests by which no answer can be judged."""


def name_of(target: Any) -> list[str] | None:
    """Return module and name of an object that answers import for themselves, so `eval` is theirs, not the tests'."""
    if not issubclass(type(target), _IMPORTED):
        return None
    bound_to = getattr(target, "__self__", None)
    owner = getattr(target, "__objclass__", bound_to if isinstance(bound_to, type) else target)
    names = [getattr(owner, "__module__", None), target.__qualname__]
    try:
        found: Any = reduce(getattr, names[1].split("."), sys.modules[names[0]])
    except (AttributeError, KeyError):
        return None
    return names if found is target or (type(found) is BuiltinMethodType and found == target) else None


def by_name(module: str, qualname: str) -> Any:
    """Return what `name_of` named. Raises ImportError or AttributeError."""
    return reduce(getattr, qualname.split("."), import_module(module))


def check(target: Any) -> None:
    """Raise UnfitError for a callable, except functions of the tests and methods of plain containers."""
    function = target.__func__ if type(target) is MethodType else target
    is_function = type(function) is FunctionType and function.__code__.co_filename == TESTS_FILE
    is_method = type(target) is BuiltinMethodType and type(target.__self__) in _CONTAINERS
    if callable(target) and not is_function and not is_method:
        raise UnfitError(
            f"they hand an object of {type(target).__name__} to the answer, which could call it; expected plain values, "
            "functions that the tests define, or what can be imported"
        )
