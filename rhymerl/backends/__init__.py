"""Backends: where answers are generated."""

from rhymerl.backends.base import RolloutBackend

__all__ = ["RolloutBackend"]
