"""The meaning of a user's own backend when the interface changes."""

from __future__ import annotations

import pytest

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.testing import ScriptedBackend


class Counting(ScriptedBackend):
    """Counts how often it sleeps."""

    times = 0

    def sleep(self) -> None:
        self.times += 1


@pytest.mark.parametrize("base", [ScriptedBackend, SGLangBackend])
def test_a_backend_that_overrides_the_former_name_of_sleep_is_still_told(base: type[RolloutBackend]) -> None:
    with pytest.warns(DeprecationWarning, match=r"Resting\.rest is called sleep now"):

        class Resting(base):  # type: ignore[valid-type, misc]
            times = 0

            def rest(self) -> None:
                self.times += 1

    backend = Resting.__new__(Resting)
    backend.sleep()
    assert backend.times == 1


def test_the_former_name_does_what_sleep_does() -> None:
    backend = Counting({})
    backend.rest()
    assert backend.times == 1
    ScriptedBackend({}).rest()


def test_the_former_name_may_be_extended_and_extended_again() -> None:
    """It was written when `sleep` was called `rest`, and does what it inherits as well."""
    with pytest.warns(DeprecationWarning, match=r"Extending\.rest is called sleep now"):

        class Extending(Counting):
            def rest(self) -> None:
                self.rested = getattr(self, "rested", 0) + 1
                super().rest()

    class Later(Extending):
        def sleep(self) -> None:
            super().sleep()
            self.slept = True

    backend = Later({})
    backend.sleep()
    assert (backend.times, backend.rested, backend.slept) == (1, 1, True)
