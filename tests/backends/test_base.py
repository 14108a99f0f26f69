"""The meaning of a user's own backend when the interface changes."""

from __future__ import annotations

import pytest

from rhymerl.testing import ScriptedBackend


class Resting(ScriptedBackend):
    """Overrides the former name."""

    times = 0

    def rest(self) -> None:
        self.times += 1


def test_a_backend_that_overrides_the_former_name_of_sleep_is_still_told() -> None:
    backend = Resting({})
    with pytest.warns(DeprecationWarning, match="Resting.rest is called sleep now"):
        backend.sleep()
    assert backend.times == 1


def test_the_former_name_does_what_sleep_does() -> None:
    ScriptedBackend({}).rest()


class Extending(ScriptedBackend):
    """It was written when `sleep` was called `rest`, and does what it inherits as well."""

    def rest(self) -> None:
        self.rested = getattr(self, "rested", 0) + 1
        super().rest()


def test_the_former_name_may_be_extended() -> None:
    backend = Extending({})
    with pytest.warns(DeprecationWarning, match="Extending.rest is called sleep now"):
        backend.sleep()
    assert backend.rested == 1
