"""Drafters: where the guesses come from. A drafter is imported when first used; the base needs no numpy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rhymerl.drafters.base import Drafter

if TYPE_CHECKING:
    from rhymerl.drafters.none import NoDrafter

__all__ = ["Drafter", "NoDrafter"]

_HOMES = {"NoDrafter": "none"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
