"""Whole runs, each what a command does: fit, resume, generate, replay, warmstart, export."""
