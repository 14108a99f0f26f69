"""Environments: what answers the policy between its turns, tools among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhymerl.environments.base import Environment, Reply, Turn, pure
from rhymerl.lazy import lazy_names

if TYPE_CHECKING:
    from rhymerl.environments.ready import Python, answer, calculator, python
    from rhymerl.environments.tools import Tools

__all__ = ["Environment", "Python", "Reply", "Tools", "Turn", "answer", "calculator", "pure", "python"]

if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __getattr__, __dir__ = lazy_names(__name__)
