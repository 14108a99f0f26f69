"""Compiled numba functions: cached on disk where that is possible, announced when the compiler has to run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
# Sums may be reordered, so that they vectorise; infinities and NaN keep their meaning.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
_log = logging.getLogger("rhymerl")


def compiled(function: Function) -> Function:
    """`numba.njit` with the GIL released, compiled at the first call; the import of numba waits until then too.

    numba caches next to the source, else in the user's cache directory; where neither is writable the
    function is compiled again by every process.
    """
    dispatcher: Any = None

    @wraps(function)
    def call(*args: Any) -> Any:
        nonlocal dispatcher
        if dispatcher is None:
            dispatcher = _dispatcher(function)
        return dispatcher(*args)

    return call  # type: ignore[return-value]


def _dispatcher(function: Callable[..., Any]) -> Any:
    import numba

    try:
        dispatcher = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # numba: "cannot cache function: no locator available"
        dispatcher = numba.njit(**_OPTIONS)(function)
    if not _is_cached(dispatcher, function):
        _log.info("compiling %s (some seconds, once)", function.__qualname__)
    return dispatcher


def _is_cached(dispatcher: Any, function: Callable[..., Any]) -> bool:
    folder = dispatcher.stats.cache_path
    stem = Path(function.__code__.co_filename).stem
    return folder is not None and any(Path(folder).glob(f"{stem}.{function.__qualname__}-*.nbi"))
