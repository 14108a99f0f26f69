"""Whole runs whose passes take as long as on another device."""

from benchmarks.emulation.device import EmulatedBackend, EmulatedDevice

__all__ = ["EmulatedBackend", "EmulatedDevice"]
