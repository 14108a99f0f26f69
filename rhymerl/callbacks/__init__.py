"""Lightning callbacks: what one sees of a run."""

from rhymerl.callbacks.progress import LiveProgress
from rhymerl.callbacks.samples import SampleTable
from rhymerl.callbacks.summary import Summary

__all__ = ["LiveProgress", "SampleTable", "Summary"]
