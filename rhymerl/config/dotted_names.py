"""Find classes and functions, which may be the user's own, by their dotted names."""

from __future__ import annotations

import importlib
import os
import pkgutil
from itertools import takewhile
from types import ModuleType
from typing import Any, NamedTuple

from rhymerl.errors import ConfigError, did_you_mean
from rhymerl.hooks import describe_error


class Found(NamedTuple):
    """The home of an object: `Found("my_package.checks", "Checks.score", <function>)`."""

    module: str
    qualname: str
    target: Any


def is_dotted(name: str) -> bool:
    """Return whether this could be `my_module.MyClass`."""
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def find(name: str, *, where: str, error: type[ValueError | ConfigError] = ValueError) -> Found:
    """Import what a dotted name names: its first parts are modules, as many as can be imported, others attributes.

    Raises `error`, which starts with `where`.
    """
    parts = name.split(".")
    attempts = (_module(".".join(parts[:end]), where, error) for end in range(1, len(parts)))
    modules = list(takewhile(lambda module: module is not None, attempts))
    if not modules:
        near = did_you_mean(parts[0], [each.name for each in pkgutil.iter_modules()])
        raise error(f"{where}: no module named {parts[0]!r}, neither installed nor in the current directory{near}")
    target: Any = modules[-1]
    for part in parts[len(modules) :]:
        if not hasattr(target, part):
            owner = getattr(target, "__name__", name)
            near = did_you_mean(part, _members(target)) or _hidden_here(target) or _of_earlier(owner)
            raise error(f"{where}: {owner} has no {part!r}{near}")
        target = getattr(target, part)
    return Found(".".join(parts[: len(modules)]), ".".join(parts[len(modules) :]), target)


def _module(name: str, where: str, error: type[ValueError | ConfigError]) -> ModuleType | None:
    """Return the module, None where there is none of that name. Raises `error` for whatever it raises itself."""
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as raised:
        if isinstance(raised, ModuleNotFoundError) and raised.name == name:
            return None
        message = describe_error(raised, without=(__file__, importlib.__file__))
        raise error(f"{where}: importing {name!r} failed: {message}") from raised


def _members(target: Any) -> list[str]:
    """Return the public attributes, and the submodules of a package."""
    submodules = [module.name for module in pkgutil.iter_modules(getattr(target, "__path__", []))]
    return [name for name in (*dir(target), *submodules) if not name.startswith("_")]


def _hidden_here(found: Any) -> str:
    """Return a hint where the current directory has a module of that name too, which an installed one hides."""
    file = getattr(found, "__file__", None)
    name = getattr(found, "__name__", "").partition(".")[0]
    is_here = any(os.path.exists(os.path.join(os.getcwd(), each)) for each in (f"{name}.py", f"{name}/__init__.py"))
    if not file or not is_here or os.path.commonpath([os.getcwd(), os.path.abspath(file)]) == os.getcwd():
        return ""
    return f"; it is {file}, which hides yours of the same name: give yours another one"


def _of_earlier(owner: str) -> str:
    """Return where a name in our package that it does not have may come from."""
    is_ours = owner.partition(".")[0] == "rhymerl"
    return "; a run of a version before 0.2 goes on with that version only" if is_ours else ""
