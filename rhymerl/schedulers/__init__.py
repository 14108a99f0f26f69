"""Schedulers: which worker answers what, and when."""

from rhymerl.schedulers.base import Scheduler
from rhymerl.schedulers.fifo import FIFOScheduler

__all__ = ["FIFOScheduler", "Scheduler"]
