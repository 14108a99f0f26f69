"""Charts of the history: how much it holds, and how far answers repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rhymerl.report.base import Run
from rhymerl.report.charts.base import Chart, line_charts, run_colour, series_of

_AGE = "history/hit_epoch_age"
_AGES = {
    _AGE: (
        "Age of what was right",
        "Mean age of the answers that accepted draft tokens came from, in epochs before the prompt's newest answers. Steps without such tokens are left out.",
        "epochs",
    )
}
_SIZES = {
    "history/tokens": ("Tokens in the history", "Tokens of the earlier answers that drafts may come from.", "tokens"),
    "history/bytes": (
        "Bytes of the history",
        "Bytes of the token ids of these answers and their prompts.",
        "bytes",
    ),
}


def history_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of this section."""
    return [
        _similarity(runs),
        *line_charts(runs, _SIZES, is_smoothed=False),
        *line_charts([_where_history_was_right(run) for run in runs], _AGES),
    ]


def _where_history_was_right(run: Run) -> Run:
    """Return the run with ages only for steps that accepted a token from the history: other steps log 0."""
    age, share = run.curves.get(_AGE), run.curves.get("spec/accepted_history_frac")
    if age is None or share is None:
        return run
    return replace(run, curves={**run.curves, _AGE: {step: value for step, value in age.items() if share.get(step)}})


def _similarity(runs: Sequence[Run]) -> Chart:
    series = [
        series_of(run.name, run.similarity, run_colour(index), "bars")
        for index, run in enumerate(runs)
        if run.similarity
    ]
    return Chart(
        id="similarity",
        title="Similarity to the epoch before",
        caption="Share of the tokens that repeat answers of the epoch before, of the epochs that the history held at the end.",
        x_title="epoch",
        y_title="share of tokens",
        series=series,
    )
