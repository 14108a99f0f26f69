"""The run-ahead state: what was prefetched for a step. It outlives updates, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from rhymerl.replayed import KeptSets
from rhymerl.types import Output, TurnEnd
from rhymerl.workers.coordinator import SharedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAheadState:
    """The outputs that a rank has for `step`, by request id, what was `asked`, and the plan they were sampled by."""

    step: int
    asked: str
    plan: SharedPlan
    outputs: Mapping[str, Output]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers, strings and tensors."""
        return {
            "step": self.step,
            "asked": self.asked,
            "queues": [list(queue) for queue in self.plan.queues],
            "digest": self.plan.digest,
            "outputs": {name: _packed(output) for name, output in self.outputs.items()},
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> RunAheadState:
        plan = SharedPlan(queues=state["queues"], digest=state["digest"])
        outputs = {name: _unpacked(each) for name, each in state["outputs"].items()}
        return cls(step=state["step"], asked=state["asked"], plan=plan, outputs=outputs)


def merge_states(states: Sequence[RunAheadState | None]) -> RunAheadState | None:
    """Return what all ranks have together; all or none of them have a plan."""
    known = [state for state in states if state is not None]
    if not known:
        return None
    return replace(known[0], outputs={name: output for state in known for name, output in state.outputs.items()})


def _packed(output: Output) -> dict[str, Any]:
    named = {each.name: getattr(output, each.name) for each in fields(output)}
    named["turns"] = [asdict(turn) for turn in output.turns]
    named["kept"] = _tensors(asdict(output.kept)) if output.kept is not None else None
    return _tensors(named)


def _tensors(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.tensor(value) if isinstance(value, np.ndarray) else value for name, value in named.items()}


def _arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _unpacked(state: Mapping[str, Any]) -> Output:
    named = _arrays(state)
    named["turns"] = tuple(TurnEnd(**turn) for turn in state.get("turns", ()))
    if state.get("kept") is not None:
        named["kept"] = KeptSets(**_arrays(state["kept"]))
    return Output(**named)
