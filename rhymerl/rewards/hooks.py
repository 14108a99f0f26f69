"""Optional hooks of a reward function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

Extract = Callable[[str], object]  # from an answer's text to what is compared, None where there is nothing
# By parameter, from a reward's arguments.
Opens = Mapping[str, Callable[[Mapping[str, Any]], AbstractContextManager[Any]]]
# From a row's answer to what is wrong with it, such as "earn nothing themselves"; raises ValueError where no completion
# can match it.
TryAnswer = Callable[[object], str]
Function = TypeVar("Function", bound=Callable[..., Any])


def brings(
    *,
    check: Callable[[Any], None] | None = None,
    extract: Extract | None = None,
    opens: Opens | None = None,
    try_answer: TryAnswer | None = None,
) -> Callable[[Function], Function]:
    """Return a decorator that adds hooks to a reward function.

    `check` gets the Reward and raises ConfigError, before any compute, where the function cannot work; `extract` is for
    maj@k. `opens` is for what outlives a call: each process that calls the function makes it once, by parameter from
    the reward's arguments, and closes it in the end. `try_answer` gets the column `answer` of each row before a run.
    All become attributes of the function, which other ways of setting them do as well.
    """

    def decorate(function: Function) -> Function:
        function.__dict__.update({"check": check, "extract": extract, "opens": opens, "try_answer": try_answer})
        return function

    return decorate


def opens_of(function: object) -> Opens:
    """Return the resources that a function wants to have open."""
    return getattr(function, "opens", None) or {}


def opened(function: object, arguments: Mapping[str, Any], stack: ExitStack) -> dict[str, Any]:
    """Return the arguments and the function's open resources, which close with `stack`."""
    opens = {name: open_it for name, open_it in opens_of(function).items() if name not in arguments}
    return {**arguments, **{name: stack.enter_context(open_it(arguments)) for name, open_it in opens.items()}}
