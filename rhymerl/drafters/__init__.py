"""Drafters: where the guesses come from."""

from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter

__all__ = ["Drafter", "NoDrafter"]
