"""Compiled numba functions: cached on disk where that is possible, announced when the compiler has to run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cached_property, update_wrapper
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
# Sums may be reordered, so that they vectorise; infinities and NaN keep their meaning.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
_log = logging.getLogger("rhymerl")


def compiled(function: Function) -> Function:
    """`numba.njit` with the GIL released, compiled at the first call; the import of numba waits until then too.

    It may call compiled functions of its own module, and take NamedTuples of it (numba's cache does not see changes in
    another file). numba caches next to the source, else in the user's cache directory; where neither is writable the
    function is compiled again by every process.
    """
    return _Compiled(function)  # type: ignore[return-value]


class _Compiled:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    @cached_property
    def _call(self) -> Any:
        """Call with the fields of records one by one: numba would take 5 us to look up the type of each record."""
        code, names = self.function.__code__, self.function.__globals__
        parameters = code.co_varnames[: code.co_argcount]
        annotations = self.function.__annotations__
        found = [_fields_of(name, annotations.get(name), names) for name in parameters]
        paths, made = [each for of_one, _ in found for each in of_one], ", ".join(each for _, each in found)
        if paths == list(parameters):
            return self._dispatcher(self._with_callees())
        flat = f"def {code.co_name}({', '.join(map(_flat, paths))}): return _inlined({made})"
        space = {**names, "_inlined": self.inlined}
        exec(compile(flat, code.co_filename, "exec"), space)
        function = space[code.co_name]
        function.__qualname__, function.__module__ = self.function.__qualname__, self.function.__module__
        function.__code__ = function.__code__.replace(co_firstlineno=code.co_firstlineno)
        space = {"_dispatcher": self._dispatcher(function)}
        return eval(f"lambda {', '.join(parameters)}: _dispatcher({', '.join(paths)})", space)

    def _dispatcher(self, function: Callable[..., Any]) -> Any:
        import numba

        try:
            dispatcher = numba.njit(cache=True, **_OPTIONS)(function)
        except RuntimeError:  # numba: "cannot cache function: no locator available"
            dispatcher = numba.njit(**_OPTIONS)(function)
        if not _is_cached(dispatcher, function):
            _log.info("compiling %s (some seconds, once)", function.__qualname__)
        return dispatcher

    @cached_property
    def inlined(self) -> Any:
        """Return the function for compiled callers, which inline its code.

        Otherwise a process that compiles both would call the function by itself, and one that loads the caller from the
        cache a copy that was optimized with it: their sums are rounded differently.
        """
        import numba

        return numba.njit(forceinline=True, **_OPTIONS)(self._with_callees())

    def _with_callees(self) -> Callable[..., Any]:
        """Return the function, its compiled callees bound to numba's own objects, which numba can compile into it."""
        function = self.function
        assert isinstance(function, FunctionType)
        called = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        inner = {name: value.inlined for name, value in called.items() if isinstance(value, _Compiled)}
        if not inner:
            return function
        bound = FunctionType(
            function.__code__, {**function.__globals__, **inner}, closure=function.__closure__, name=function.__name__
        )
        return update_wrapper(bound, function)


def _is_cached(dispatcher: Any, function: Callable[..., Any]) -> bool:
    folder = dispatcher.stats.cache_path
    stem = Path(function.__code__.co_filename).stem
    return folder is not None and any(Path(folder).glob(f"{stem}.{function.__qualname__}-*.nbi"))


def _record_of(annotation: Any, names: Mapping[str, Any]) -> Any:
    """Return the NamedTuple that an annotation names; None for anything else."""
    name = getattr(annotation, "__forward_arg__", annotation)
    kind = names.get(name) if isinstance(name, str) else name
    return kind if isinstance(kind, type) and issubclass(kind, tuple) else None


def _fields_of(path: str, annotation: Any, names: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the paths of an argument's arrays and numbers, and an expression that rebuilds it from `_flat`'s names."""
    kind = _record_of(annotation, names)
    if kind is None:
        return [path], _flat(path)
    found = [_fields_of(f"{path}.{field}", kind.__annotations__[field], names) for field in kind._fields]
    return [each for paths, _ in found for each in paths], f"{kind.__name__}({', '.join(made for _, made in found)})"


def _flat(path: str) -> str:
    return path.replace(".", "__")
