"""Calls of the user's own code, such as drafters, budgets and schedulers; errors name class and line."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from types import TracebackType

from rhymerl.errors import HookError, RhymeError

_MAX_MESSAGE_CHARACTERS = 500


def class_path(component: object) -> str:
    """Return a class's path, such as `my_module.MyDrafter`."""
    return f"{type(component).__module__}.{type(component).__qualname__}"


def line_of(component: object, hook: str) -> str:
    """Return the file and line of a class's hook, as `my_module.py:12`; its module if there is no such file."""
    code = getattr(inspect.unwrap(getattr(type(component), hook)), "__code__", None)
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code is not None else class_path(component)


class Hooks:
    """Turns exceptions of a component into HookErrors: `with hooks:` stands around its calls.

    `setting` names the component. A HookError names the last line of the component's own file that led
    there. Errors of rhymerl's own pass as they are.
    """

    __slots__ = ("component", "setting")

    def __init__(self, setting: str, component: object) -> None:
        self.setting = setting
        self.component = component

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, RhymeError):
            return
        frames = traceback.extract_tb(trace)
        own = getattr(sys.modules.get(type(self.component).__module__), "__file__", None)
        frame = next((each for each in reversed(frames) if each.filename == own), frames[-1])
        raised = traceback.format_exception_only(error)[-1].strip()
        raise HookError(
            f"{self.setting}={class_path(self.component)}: {frame.name} raised {raised} "
            f"({os.path.basename(frame.filename)}:{frame.lineno})"
        ) from error


def describe_error(error: BaseException, *, without: tuple[str, ...]) -> str:
    """Return `ZeroDivisionError: division by zero (my_rewards.py:12)`, with the place of the innermost frame.

    Frames of files whose names begin as those in `without` do not count.
    """
    line = traceback.format_exception_only(error)[-1].strip()[:_MAX_MESSAGE_CHARACTERS]
    frames = [
        each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(("<", *without))
    ]
    return f"{line} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else line
