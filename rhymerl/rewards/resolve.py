"""Find a reward function by its dotted name, and the name by the function."""

from __future__ import annotations

from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from rhymerl.config import dotted_names
from rhymerl.config.dotted_names import Found
from rhymerl.rewards.calls import Attempt


def find(name: str, *, argument: str) -> Found:
    """Import what a dotted name names. Raises ValueError, which starts with `argument`."""
    if not dotted_names.is_dotted(name):
        ours = "rhymerl.rewards"
        hint = f"; did you mean {ours}.{name}?" if name in import_module(ours).__all__ else ""
        raise ValueError(f"{argument}: expected a dotted name such as 'my_module.my_function'{hint}")
    return dotted_names.find(name, where=argument)


def find_home(function: Any) -> Found | None:
    """Return where another process can import `function` from; None for a closure, a lambda, the main script's."""
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if not module or not qualname or module == "__main__":
        return None
    with Attempt():
        if resolve_name(f"{module}:{qualname}") == function:
            return Found(module, qualname, function)
    return None
