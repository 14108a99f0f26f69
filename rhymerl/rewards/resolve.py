"""Find a user's function by its dotted name, and the name by the function."""

from __future__ import annotations

import pkgutil
from functools import reduce
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from rhymerl.errors import did_you_mean
from rhymerl.rewards.calls import Attempt


class Found(NamedTuple):
    """The home of an object: `Found("my_package.checks", "Checks.score", <function>)`."""

    module: str
    qualname: str
    target: Any


def find(dotted_name: str, *, argument: str) -> Found:
    """Import what a dotted name names. Raises ValueError, which starts with `argument`."""
    parts = dotted_name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        ours = "rhymerl.rewards"
        hint = f"; did you mean {ours}.{dotted_name}?" if dotted_name in import_module(ours).__all__ else ""
        raise ValueError(f"{argument}: expected a dotted name such as 'my_module.my_function'{hint}")
    module = _import_longest(parts[:-1], argument)
    target: Any = module
    names = parts[module.__name__.count(".") + 1 :]
    for name in names:
        if not hasattr(target, name):
            owner = getattr(target, "__name__", dotted_name)
            raise ValueError(f"{argument}: {owner} has no {name!r}{did_you_mean(name, _members(target))}")
        target = getattr(target, name)
    return Found(module.__name__, ".".join(names), target)


def find_home(function: Any) -> Found | None:
    """Return where another process can import `function` from; None for a closure, a lambda, the main script's."""
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if not module or not qualname or module == "__main__":
        return None
    with Attempt():
        if imported(module, qualname) == function:
            return Found(module, qualname, function)
    return None


def imported(module: str, qualname: str) -> Any:
    """Return what has that name in the module, which is imported."""
    return reduce(getattr, qualname.split("."), import_module(module))


def _import_longest(parts: list[str], argument: str) -> ModuleType:
    """Return the deepest module that `parts` lead to; what is left of them are attributes."""
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        with Attempt() as attempt:
            return import_module(name)
        missing = attempt.error.name if isinstance(attempt.error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise ValueError(f"{argument}: importing {name!r} failed: {attempt.message}")
    known = (module.name for module in pkgutil.iter_modules())
    raise ValueError(
        f"{argument}: no module named {parts[0]!r}, neither installed nor in the current directory{did_you_mean(parts[0], known)}"
    )


def _members(target: Any) -> list[str]:
    """Return the public attributes, and the submodules of a package."""
    submodules = [module.name for module in pkgutil.iter_modules(getattr(target, "__path__", []))]
    return [name for name in (*dir(target), *submodules) if not name.startswith("_")]
