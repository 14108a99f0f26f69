"""Compiled numba functions: cached on disk where that is possible, announced when the compiler has to run."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
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

    It may call compiled functions of its own module, and take NamedTuples of it (numba's cache does not see changes in another file). numba caches
    next to the source, else in the user's cache directory; where neither is writable the function is
    compiled again by every process.
    """
    return _Compiled(function)  # type: ignore[return-value]


class _Compiled:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        return self.dispatcher(*args)

    @cached_property
    def dispatcher(self) -> Any:
        import numba

        function = self._with_callees()
        try:
            dispatcher = numba.njit(cache=True, **_OPTIONS)(function)
        except RuntimeError:  # numba: "cannot cache function: no locator available"
            dispatcher = numba.njit(**_OPTIONS)(function)
        if not _is_cached(dispatcher, function):
            _log.info("compiling %s (some seconds, once)", function.__qualname__)
        return dispatcher

    @cached_property
    def inlined(self) -> Any:
        """The function for callers that are compiled: they take the code into their own.

        Otherwise a process that compiles both would call the function by itself, and one that loads the caller from the cache a copy
        that was optimized with it: their sums are rounded differently.
        """
        import numba

        return numba.njit(forceinline=True, **_OPTIONS)(self._with_callees())

    def _with_callees(self) -> Callable[..., Any]:
        """Return the function with what it calls by compiled name bound to numba's own objects, which it can compile into it."""
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
    """Return whether an earlier process has compiled it. What cannot be read, since its types had other names then, is removed: numba would raise."""
    folder, stem = dispatcher.stats.cache_path, Path(function.__code__.co_filename).stem
    found = [] if folder is None else Path(folder).glob(f"{stem}.{function.__qualname__}-*.nbi")
    return bool([index for index in found if _is_readable(index)])


def _is_readable(index: Path) -> bool:
    try:
        with index.open("rb") as file:
            _version, _signatures = pickle.load(file), pickle.load(file)
    except (AttributeError, ImportError):
        index.unlink(missing_ok=True)
        return False
    return True
