"""The processes that train together, and how they talk."""

from rhymerl.ranks.base import Alone, Ranks

__all__ = ["Alone", "Ranks"]
