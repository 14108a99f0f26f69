"""What a reward function may bring along besides its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rhymerl.rewards.base import Reward

Extract = Callable[[str], object]  # from an answer's text to what is compared, None where there is nothing
Function = TypeVar("Function", bound=Callable[..., Any])


def brings(
    *, check: Callable[[Reward], None] | None = None, extract: Extract | None = None
) -> Callable[[Function], Function]:
    """A decorator. `check` raises ConfigError, before any compute, where the function cannot work; `extract` is for maj@k.

    Both become attributes of the function, which other ways of setting them do as well.
    """

    def decorate(function: Function) -> Function:
        function.__dict__.update({"check": check, "extract": extract})
        return function

    return decorate
