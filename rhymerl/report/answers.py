"""The answers of a run as columns, and how prompts fare from one epoch to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rhymerl.report.base import Answers, AnswerText

if TYPE_CHECKING:
    from rhymerl.types import FloatArray, IndexArray

_COUNTS = ("sample", "tokens", "passes", "drafted", "accepted", "is_cut")


def answers_of_steps(records: Iterable[Mapping[str, Any]]) -> Answers | None:
    """Return the answers that steps have recorded; None where there is none."""
    columns: dict[str, list[Any]] = {name: [] for name in (*_COUNTS, "step", "epoch", "prompt_id", "reward")}
    texts: dict[int, AnswerText] = {}
    for record in records:
        found, first = record["answers"], len(columns["step"])
        for name in (*_COUNTS, "prompt_id", "reward"):
            columns[name] += found[name]
        for name in ("step", "epoch"):
            columns[name] += [record[name]] * len(found["reward"])
        texts |= {first + each["answer"]: _text(each) for each in record["texts"]}
    if not columns["step"]:
        return None
    prompt_ids = list(dict.fromkeys(columns["prompt_id"]))
    numbers = {name: number for number, name in enumerate(prompt_ids)}
    prompt = np.array([numbers[name] for name in columns["prompt_id"]], np.int64)
    counts: dict[str, Any] = {name: np.array(columns[name], np.int64) for name in (*_COUNTS, "step", "epoch")}
    reward = np.array(columns["reward"], np.float64)
    return Answers(
        **{**counts, "is_cut": counts["is_cut"] > 0},
        prompt=prompt,
        reward=reward,
        change=_changes(prompt, counts["epoch"], reward),
        prompt_ids=prompt_ids,
        texts=texts,
    )


def _text(row: Mapping[str, Any]) -> AnswerText:
    runs = row["runs"]
    return AnswerText(
        prompt=row["prompt"],
        text=row["text"],
        runs=[(count, source) for count, source in runs] if runs is not None else None,
        rewards=row["rewards"],
        advantage=row["advantage"],
    )


def _changes(prompt: IndexArray, epoch: IndexArray, reward: FloatArray) -> FloatArray:
    """Return for each answer [N] by how much its prompt's mean reward rose since the epoch in which the prompt was before."""
    visit = prompt * (epoch.max() + 1) + epoch  # ascends by prompt, then epoch
    visits, index = np.unique(visit, return_inverse=True)
    mean = np.bincount(index, reward) / np.bincount(index)
    owner = visits // (epoch.max() + 1)
    change = np.full(len(visits), np.nan)
    same = owner[1:] == owner[:-1]
    change[1:][same] = (mean[1:] - mean[:-1])[same]
    found: FloatArray = change[index]
    return found


def by_epoch(answers: Answers, part: str, whole: str) -> dict[int, float]:
    """Return the ratio of two columns' sums in each epoch in which the second has any."""
    parts, wholes = (np.bincount(answers.epoch, getattr(answers, name)) for name in (part, whole))
    return {int(epoch): float(parts[epoch] / wholes[epoch]) for epoch in np.flatnonzero(wholes)}
