"""Names of a package that are imported when first used, so that importing the package costs next to nothing."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package: what it imports under TYPE_CHECKING is imported when used.

    `__getattr__, __dir__ = lazy_names(__name__)`: where a name lives is said once, where type checkers read it.
    """
    module = sys.modules[package]
    blocks = [each for each in ast.parse(inspect.getsource(module)).body if isinstance(each, ast.If)]
    imports = [each for block in blocks for each in block.body if isinstance(each, ast.ImportFrom)]
    homes = {name.name: str(each.module) for each in imports for name in each.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    def names() -> list[str]:
        return sorted({*vars(module), *homes})

    return get, names
