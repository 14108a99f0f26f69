"""Lightning callbacks: what one sees of a run, and what is kept of it."""

from rhymerl.callbacks.checkpoints import AtomicCheckpointIO, Checkpoints
from rhymerl.callbacks.early_warnings import EarlyWarnings
from rhymerl.callbacks.histograms import AcceptanceHistograms
from rhymerl.callbacks.profile import RecordPasses
from rhymerl.callbacks.progress import LiveProgress
from rhymerl.callbacks.recording import RecordRollouts
from rhymerl.callbacks.samples import SampleTable, WriteAnswers
from rhymerl.callbacks.steps import RecordSteps
from rhymerl.callbacks.stop import StopOnRequest

__all__ = [
    "AcceptanceHistograms",
    "AtomicCheckpointIO",
    "Checkpoints",
    "EarlyWarnings",
    "LiveProgress",
    "RecordPasses",
    "RecordRollouts",
    "RecordSteps",
    "SampleTable",
    "StopOnRequest",
    "WriteAnswers",
]
