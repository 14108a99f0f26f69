"""Environments of other projects, each by its own package, which is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhymerl.lazy import lazy_names

if TYPE_CHECKING:
    from rhymerl.environments.adapters.openenv import OpenEnv, OpenEnvTask
    from rhymerl.environments.adapters.verifiers import Verifiers, VerifiersTask

__all__ = ["OpenEnv", "OpenEnvTask", "Verifiers", "VerifiersTask"]

if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __getattr__, __dir__ = lazy_names(__name__)
