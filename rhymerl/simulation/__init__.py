"""Simulates schedulers on one to thousands of workers, without a model."""

from rhymerl.simulation.base import Decoding, LengthSource, StepWork, Timeline
from rhymerl.simulation.pipeline import Simulation
from rhymerl.simulation.workload import RecordedLengths, SyntheticLengths

__all__ = [
    "Decoding",
    "LengthSource",
    "RecordedLengths",
    "Simulation",
    "StepWork",
    "SyntheticLengths",
    "Timeline",
]
