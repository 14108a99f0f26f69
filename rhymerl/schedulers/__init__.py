"""Schedulers: which worker answers what, and when. One is imported when first used; the base needs no numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhymerl.lazy import lazy_names
from rhymerl.schedulers.base import Move, Progress, Scheduler
from rhymerl.schedulers.fifo import FIFOScheduler

if TYPE_CHECKING:
    from rhymerl.schedulers.histopipe import HistoPipeScheduler
    from rhymerl.schedulers.lengths import LengthPredictor
    from rhymerl.schedulers.paced import PacedScheduler
    from rhymerl.schedulers.packed import PackedScheduler
    from rhymerl.schedulers.sorted import SortedScheduler

__all__ = [
    "FIFOScheduler",
    "HistoPipeScheduler",
    "LengthPredictor",
    "Move",
    "PacedScheduler",
    "PackedScheduler",
    "Progress",
    "Scheduler",
    "SortedScheduler",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __getattr__, __dir__ = lazy_names(__name__)
