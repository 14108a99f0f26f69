"""The state that a run has learned: put into a checkpoint, and taken up again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

from rhymerl.distributed.base import Ranks
from rhymerl.errors import ConfigError
from rhymerl.training.checkpoint import FORMAT

# Parts of a RhymeModule: how far the run is, what learns, and which of that a user may replace.
_COUNTS = ("num_rollouts", "num_tokens", "logged", "first_epochs")
_LEARNERS = ("algo", "history", "evaluator", "scheduler")
_PARTS = ("algo", "scheduler", "budget")


class Learner(Protocol):
    """A part of a run that learns while it goes on."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def state_of(module: Any, loop: Learner | None, ranks: Ranks) -> dict[str, Any]:
    """Return all of it in plain containers; called on every rank, since each has a budget of its own."""
    return {
        "format": FORMAT,
        **{name: getattr(module, name) for name in (*_COUNTS, "base_fingerprint", "teacher_fingerprint")},
        **{name: getattr(module, name).state_dict() for name in _LEARNERS},
        "classes": {name: _class_of(getattr(module, name)) for name in _PARTS},
        "budgets": ranks.gather(module.budget.state_dict()),
        "loop": loop.state_dict() if loop is not None else None,
        "policy_files": module.policy.files(),
    }


def load_state(module: Any, state: Mapping[str, Any]) -> None:
    """Go on from what `state_of` returned."""
    for name in _COUNTS:
        setattr(module, name, copy.copy(state[name]))
    for name in _LEARNERS:
        if is_of_same_class(module, name, state):
            getattr(module, name).load_state_dict(state[name])


def load_budget(module: Any, state: Mapping[str, Any], rank: int) -> None:
    """Load this rank's estimates; the first rank's if there were fewer ranks."""
    if is_of_same_class(module, "budget", state):
        budgets = state["budgets"]
        module.budget.load_state_dict(budgets[rank if rank < len(budgets) else 0])


class Resumed:
    """A checkpoint's state of the loop and the budget, which exist only once the workers do."""

    def __init__(self) -> None:
        self._state: Mapping[str, Any] | None = None

    def keep(self, state: Mapping[str, Any]) -> None:
        self._state = {name: state[name] for name in ("budgets", "loop", "classes")}

    def restore(self, module: Any, loop: Learner | None, ranks: Ranks | None) -> None:
        """Restore the loop and the budget once the workers exist.

        Under fsdp2 that is before a checkpoint is read, otherwise after it.
        """
        if self._state is None or loop is None or ranks is None:
            return
        if self._state["loop"] is not None:
            loop.load_state_dict(self._state["loop"])
        load_budget(module, self._state, ranks.rank)
        self._state = None


def is_of_same_class(module: Any, name: str, state: Mapping[str, Any]) -> bool:
    """Return whether a part's class is the saved one, or unknown; a part of another class begins anew."""
    return state["classes"].get(name) in (None, _class_of(getattr(module, name)))


def _class_of(part: Learner) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"


def check_base(module: Any, state: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError unless the module was given the weights of the checkpoint's run: the first, and a teacher's."""
    if None not in (found := {state["base_fingerprint"], module.base_fingerprint}) and len(found) > 1:
        raise ConfigError(
            f"{where}: its run started from other weights than those of model.path or model.init (as model.dtype, and with the "
            "adapter's seed); a resumed run keeps its base model, which is what the KL divergence is measured from"
        )
    if state["teacher_fingerprint"] != module.teacher_fingerprint:
        raise ConfigError(
            f"{where}: its run had another teacher than that of teacher.path; a resumed run keeps its teacher"
        )
