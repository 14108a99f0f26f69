"""Drafters: where the guesses come from. A drafter is imported when first used; the base needs no numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhymerl.drafters.base import Drafter
from rhymerl.lazy import lazy_names

if TYPE_CHECKING:
    from rhymerl.drafters.history_tree import HistoryTreeDrafter
    from rhymerl.drafters.ngram import NGramDrafter
    from rhymerl.drafters.none import NoDrafter
    from rhymerl.drafters.run_ahead import RunAheadDrafter

__all__ = ["Drafter", "HistoryTreeDrafter", "NGramDrafter", "NoDrafter", "RunAheadDrafter"]

if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __getattr__, __dir__ = lazy_names(__name__)
