"""The answers of a run as columns, and how prompts fare from one epoch to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rhymerl.report.base import Answers
from rhymerl.types import FloatArray, IndexArray

_MOST = 10**7  # steps and epochs: columns are counted by them
_COUNTS = ("sample", "tokens", "passes", "drafted", "accepted", "is_cut")


class AnswerColumns:
    """Collects the answers of all steps in columns; a long run has millions."""

    def __init__(self) -> None:
        self._prompts: dict[str, int] = {}  # by id
        self._parts: dict[str, list[Any]] = {name: [] for name in (*_COUNTS, "step", "epoch", "prompt", "reward")}
        self._texts: dict[int, dict[str, Any]] = {}
        self._count = 0

    def add(self, record: Mapping[str, Any]) -> None:
        found = record["answers"]
        count = len(found["reward"])
        prompt = [self._prompts.setdefault(name, len(self._prompts)) for name in found["prompt_id"]]
        columns = {**{name: found[name] for name in _COUNTS}, "prompt": prompt}
        for name, values in columns.items():
            self._parts[name].append(np.array(values, np.int32))
        self._parts["reward"].append(np.array(found["reward"], np.float64))
        for name in ("step", "epoch"):
            if not 0 <= record[name] < _MOST:
                raise ValueError(f"{name}={record[name]}: expected at least 0 and below {_MOST}")
            self._parts[name].append(np.full(count, record[name], np.int32))
        self._texts |= {self._count + each["answer"]: _text(each) for each in record["texts"]}
        self._count += count

    def whole(self) -> Answers | None:
        """Return the answers of all steps; None where there is none."""
        if not self._count:
            return None
        columns: dict[str, Any] = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        columns |= {name: columns[name].astype(np.int64) for name in ("step", "epoch", "prompt")}
        change = _changes(columns["prompt"], columns["epoch"], columns["reward"])
        is_cut = columns.pop("is_cut") > 0
        return Answers(**columns, is_cut=is_cut, change=change, prompt_ids=list(self._prompts), texts=self._texts)


def _text(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer's text; `turns` and `finish_reason` are those of an episode.

    `runs` are lengths of characters by origin, a DraftSource or NOT_DRAFTED; None where the engine did not tell.
    """
    runs = row["runs"]
    return {
        "prompt": row["prompt"],
        "text": row["text"],
        "runs": [(count, source) for count, source in runs] if runs is not None else None,
        "rewards": row["rewards"],
        "advantage": row["advantage"],
        "turns": [_turn(each) for each in row.get("turns", ())],
        "finish_reason": str(row.get("finish_reason", "")),
    }


def _turn(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the end of a turn; the environment's reply is the characters of the answer from `start` to `stop`.

    `waited_s` is None where a limit ended the turn, and nobody was asked.
    """
    return {
        "start": int(found["start"]),
        "stop": int(found["stop"]),
        "tools": list(map(str, found["tools"])),
        **{name: None if found[name] is None else float(found[name]) for name in ("reward", "waited_s")},
    }


def _changes(prompt: IndexArray, epoch: IndexArray, reward: FloatArray) -> FloatArray:
    """Return, for each answer [N], the rise of its prompt's mean reward since the prompt's previous epoch."""
    visit = prompt * (epoch.max() + 1) + epoch  # ascends by prompt, then epoch
    visits, index = np.unique(visit, return_inverse=True)
    known = ~np.isnan(reward)
    sums, counts = (np.bincount(index[known], weights, len(visits)) for weights in (reward[known], None))
    mean = np.divide(sums, counts, out=np.full(len(visits), np.nan), where=counts > 0)
    owner = visits // (epoch.max() + 1)
    change = np.full(len(visits), np.nan)
    same = owner[1:] == owner[:-1]
    change[1:][same] = (mean[1:] - mean[:-1])[same]
    found: FloatArray = change[index]
    return found


def ratios(at: IndexArray, part: IndexArray | FloatArray, whole: IndexArray) -> dict[int, float]:
    """Return the ratio of two columns' sums by epoch or step, `at`, for those in which the second has any."""
    parts, wholes = (np.bincount(at, each) for each in (part, whole))
    return {int(place): float(parts[place] / wholes[place]) for place in np.flatnonzero(wholes)}
