"""The meaning of a user's own backend when the interface changes."""

from __future__ import annotations

from rhymerl.testing import ScriptedBackend


class Counting(ScriptedBackend):
    """Counts how often it sleeps."""

    times = 0

    def sleep(self) -> None:
        self.times += 1
