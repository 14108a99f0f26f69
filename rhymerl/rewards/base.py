"""The definition of a reward: a plain Python function and how to run it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from rhymerl.config.dotted_names import Found
from rhymerl.errors import ConfigError, DataError, did_you_mean, require
from rhymerl.rewards.arguments import is_number
from rhymerl.rewards.hooks import Extract, opens_of
from rhymerl.rewards.resolve import find, find_home
from rhymerl.types import Completion

Score: TypeAlias = float | Mapping[str, Any] | None  # a mapping has it under `score`; None: the function does not apply
#: `def reward(completion: str, *, answer: str, **columns) -> float`, sync or async, or in the batch form
#: `def reward(completions: list[str], *, answer: list[str], **columns) -> list[float]`.
RewardFn = Callable[..., Score | Awaitable[Score] | list[Score] | Awaitable[list[Score]]]
Where = Literal["pool", "main", "engine"]
OnFailure = Literal["default", "drop"]
_UNSET: Any = None  # what follows from the function
_OF_COMPLETION: Mapping[str, Callable[[Completion], Any]] = {  # what a function may name, unless a column has the name
    "prompt": lambda completion: completion.request.prompt.text,
    "token_ids": lambda completion: completion.token_ids.tolist(),
    "finish_reason": lambda completion: completion.finish_reason,
    "turns": lambda completion: [{"text": turn.text, "reply": turn.reply} for turn in completion.output.turns],
    "turn_rewards": lambda completion: [turn.reward for turn in completion.output.turns],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of a reward function after the completion."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_any: bool  # it has **columns
    completion: str  # its first parameter, which no column may shadow


@dataclass(frozen=True, slots=True)
class Reward:
    """One reward function of a run: `Reward("my_module.score", weight=0.5)`.

    The function gets the completion's text, and the row's columns that its signature accepts. It also gets, by name, if
    the row has no such column: `prompt` (its text), `token_ids`, `finish_reason`, and for episodes `turns` (each with
    its `text` and the `reply` to it) and `turn_rewards` (None where the environment gave none). It returns None if it
    does not apply to this sample. A sample whose call fails gets `default`, or with `on_failure="drop"` is treated as
    one to which the function does not apply.

    `where="pool"` runs it in reward processes, with a limit of `timeout_s` a sample; it must be importable by name.
    `"main"` runs it in the trainer's process as soon as a completion finishes. `"engine"` runs it in the process that
    owns the engine, after all completions, with a `device` keyword if the function accepts one. Neither `"main"` nor
    `"engine"` can stop a sync function. None is `"pool"`, or `"main"` for a function that no other process could
    import. With `batch=True` the function takes a chunk of completions, and lists of column values, at once (and
    `timeout_s` for each); the chunks are not fixed.

    Raises ValueError, which names the argument.
    """

    function: str | RewardFn
    _: KW_ONLY
    name: str = _UNSET  # the function's own by default
    weight: float = 1.0
    where: Where = _UNSET
    batch: bool = False
    default: float = 0.0
    on_failure: OnFailure = "default"
    timeout_s: float = 10.0
    arguments: Mapping[str, Any] = _UNSET  # fixed keyword arguments, which win over columns
    is_only_here: bool = field(init=False, repr=False, compare=False)  # and runs in main for this reason alone
    call: RewardFn = field(init=False, repr=False, compare=False)
    home: Found | None = field(init=False, repr=False, compare=False)  # where another process can import it from
    parameters: Parameters = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assign = partial(object.__setattr__, self)
        may_stay = self.where is _UNSET
        assign("name", own_name(self.function) if self.name is _UNSET else self.name)
        assign("where", "pool" if may_stay else self.where)
        assign("arguments", dict(self.arguments or {}))
        self._check_values()
        home = self._find(may_stay=may_stay)
        assign("home", home)
        assign("call", home.target if isinstance(self.function, str) and home else self.function)
        assign("parameters", _parameters(self.call, argument=self._function))
        self._check_function()

    @property
    def setting(self) -> str:
        """Return the reward's name in messages: `rewards.score.function='my_module.score'`."""
        return f"rewards.{self.name}.{self._function}"

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(
            getattr(self.call, "__call__", None)  # noqa: B004 - an object with an async __call__
        )

    @property
    def takes_device(self) -> bool:
        takes = self.parameters.takes_any or "device" in self.parameters.names
        return self.where == "engine" and takes and "device" not in self.arguments

    @property
    def extract(self) -> Extract | None:
        """Return the function that extracts the answer from a text, or None."""
        return getattr(self.call, "extract", None)

    @property
    def required_columns(self) -> tuple[str, ...]:
        known = {*self._provided, *_OF_COMPLETION}
        return tuple(name for name in self.parameters.required if name not in known)

    def select(self, columns: Mapping[str, Any], completion: Completion | None) -> dict[str, Any]:
        """Return a call's arguments from a row's columns and, if the function names them, the completion's facts."""
        provided = {self.parameters.completion, *self._provided}
        names = columns if self.parameters.takes_any else self.parameters.names
        found = {name: columns[name] for name in names if name in columns and name not in provided}
        if completion is not None:
            asked = {*self.parameters.names} - found.keys() - provided
            found |= {name: value(completion) for name, value in _OF_COMPLETION.items() if name in asked}
        return found

    @property
    def _provided(self) -> set[str]:
        """Parameters that no column is for."""
        return {*self.arguments, *opens_of(self.call), *(["device"] if self.takes_device else [])}

    @property
    def _function(self) -> str:
        shown = self.function if isinstance(self.function, str) else own_name(self.function)
        return f"function={shown!r}"

    def _check_values(self) -> None:
        is_function = isinstance(self.function, str) or callable(self.function)
        require(type(self.name) is str and bool(self.name.strip()), "name", self.name, "a name")
        require(is_function, "function", self.function, "a dotted name or a function")
        require(is_number(self.weight), "weight", self.weight, "a finite number")
        require(self.where in get_args(Where), "where", self.where, f"one of {', '.join(get_args(Where))}")
        require(isinstance(self.batch, bool), "batch", self.batch, "true or false")
        require(is_number(self.default), "default", self.default, "a finite number")
        kinds = get_args(OnFailure)
        require(self.on_failure in kinds, "on_failure", self.on_failure, f"one of {', '.join(kinds)}")
        is_time = is_number(self.timeout_s) and self.timeout_s > 0
        require(is_time, "timeout_s", self.timeout_s, "a number of seconds above 0")

    def _find(self, *, may_stay: bool) -> Found | None:
        """Return where the function is, and run it here where it has to and `may_stay`."""
        name = self.function if isinstance(self.function, str) else None
        home = find(name, argument=self._function) if name is not None else find_home(self.function)
        has_no_home = self.where == "pool" and (home is None or home.module == "__main__")
        object.__setattr__(self, "is_only_here", has_no_home and may_stay)
        if self.is_only_here:
            object.__setattr__(self, "where", "main")
        elif has_no_home:
            instead = "set where='main'" if name is not None else "pass it as a rhymerl.Reward with where='main'"
            raise ValueError(
                f"{self._function}: a reward process cannot import it by name (it is a closure, a lambda or "
                f"defined in the main script); move it into a module or {instead}"
            )
        return home

    def _check_function(self) -> None:
        for name in self.arguments:
            if not self.parameters.takes_any and name not in self.parameters.names:
                hint = did_you_mean(name, self.parameters.names)
                raise ValueError(f"arguments.{name}: the function has no such parameter{hint}")


def check_reward(reward: Reward, columns: Iterable[str], *, gaps: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for errors that the function itself finds; else see `check_columns`."""
    check = getattr(reward.call, "check", None)
    if check is not None:
        check(reward)
    check_columns(reward, columns, gaps=gaps)


def check_columns(reward: Reward, columns: Iterable[str], *, gaps: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError when no row has a column that the function requires, DataError when some have it.

    `columns` are the columns of every row; `gaps` are the columns of some rows, each with the place of the first row
    without it.
    """
    known = list(columns)
    for name in reward.required_columns:
        if gaps and name in gaps:
            raise DataError(f"{gaps[name]}: no column {name!r}, as other rows have it; {reward.setting} needs it")
        if name not in known:
            raise ConfigError(
                f"{reward.setting}: it needs a column {name!r}, and the data set has "
                f"{', '.join(known) or 'none'}{did_you_mean(name, known)}"
            )


def own_name(function: object) -> str:
    """Return the default name of a reward."""
    if isinstance(function, str):
        return function.rpartition(".")[2] or "reward"
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def _parameters(function: object, *, argument: str) -> Parameters:
    if not callable(function):
        raise ValueError(f"{argument}: it is of type {type(function).__name__}, expected a function")
    try:
        first, *others = inspect.signature(function).parameters.values()
    except ValueError as error:  # no parameters, or a builtin without a signature
        raise ValueError(f"{argument}: it must take the completion as its first argument") from error
    if first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise ValueError(f"{argument}: it must take the completion as its first argument")
    named = [each for each in others if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return Parameters(
        names=tuple(each.name for each in named),
        required=tuple(each.name for each in named if each.default is each.empty),
        takes_any=any(each.kind == each.VAR_KEYWORD for each in others),
        completion=first.name if first.kind == first.POSITIONAL_OR_KEYWORD else "",
    )
