"""The samples of a page: an index of answers, and the texts of some."""

from __future__ import annotations

from typing import Any

import numpy as np

from rhymerl.report.base import Answers
from rhymerl.types import FloatArray


def sample_data(answers: Answers, *, max_answers: int, max_texts: int) -> dict[str, Any]:
    """Return at most so many answers as columns and texts by row, of whole prompts in regularly chosen steps."""
    chosen = _chosen_rows(answers, max_answers)
    rows = {int(index): row for row, index in enumerate(chosen)}
    texts = [index for index in _chosen_texts(answers, max_texts) if index in rows]
    prompts, prompt = np.unique(answers.prompt[chosen], return_inverse=True)
    return {
        "num_answers": len(answers),
        "columns": {
            **{
                name: getattr(answers, name)[chosen].tolist()
                for name in ("step", "epoch", "sample", "tokens", "passes")
            },
            "prompt": prompt.tolist(),
            "reward": _or_none(answers.reward[chosen]),
            "change": _or_none(answers.change[chosen]),
            "is_cut": answers.is_cut[chosen].astype(int).tolist(),
        },
        "prompt_ids": [answers.prompt_ids[number] for number in prompts],
        "text_rows": [rows[index] for index in texts],
        "texts": [answers.texts[index] for index in texts],
    }


def _or_none(values: FloatArray) -> list[float | None]:
    """NaN is null, where there is no value."""
    return [None if value != value else value for value in values.round(4).tolist()]


def _chosen_rows(answers: Answers, most: int) -> Any:
    """Return the answers of evenly spaced steps, the last one included."""
    steps = np.unique(answers.step)
    stride = -(-len(answers) // most)
    while True:
        chosen = np.flatnonzero(np.isin(answers.step, steps[::-1][::stride]))
        if len(chosen) <= most or stride >= len(steps):
            return chosen[:most]
        stride += 1


def _chosen_texts(answers: Answers, most: int) -> list[int]:
    """Return the answers with texts, of as many prompts as there is room for: all of a prompt, or none."""
    by_prompt: dict[int, list[int]] = {}
    for index in sorted(answers.texts):
        by_prompt.setdefault(int(answers.prompt[index]), []).append(index)
    found: list[int] = []
    for indices in by_prompt.values():
        if found and len(found) + len(indices) > most:
            break
        found += indices[:most]
    return sorted(found)
