"""The drafter inside its wrappers: which it is, and which hooks it implements."""

from __future__ import annotations

from rhymerl.drafters.base import Drafter
from rhymerl.drafters.run_ahead import RunAheadDrafter


def listens(drafter: Drafter, hook: str) -> bool:
    """Return whether the innermost drafter implements that hook; wrappers only pass it on."""
    return getattr(type(innermost(drafter)), hook) is not getattr(Drafter, hook)


def innermost(drafter: Drafter) -> Drafter:
    """Return the drafter inside all wrappers."""
    while isinstance(drafter, RunAheadDrafter):
        drafter = drafter.inner
    return drafter
