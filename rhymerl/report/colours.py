"""The colours of reports, for light and dark pages; pictures have the light ones."""

from __future__ import annotations

_SERIES = (
    ("#2f6db5", "#6fa8e6"),
    ("#c4682b", "#e59a5f"),
    ("#3a8a68", "#6bbd98"),
    ("#97507e", "#cf8ab5"),
    ("#6b7686", "#a3adbb"),
    ("#9a7f22", "#d0b457"),
)
_PERIODS = (("#b9c9dc", "#3d4f66"), ("#8aa9cd", "#52729b"), ("#5a8ac2", "#6a97cc"), ("#23558f", "#9cc6f5"))

COLOURS: dict[str, tuple[str, str]] = {  # by name: on a light page, on a dark one
    "page": ("#fbfbf9", "#14171c"),
    "surface": ("#ffffff", "#1b1f26"),
    "ink": ("#1d2430", "#e4e8ee"),
    "muted": ("#5c6675", "#98a3b3"),
    "rule": ("#e3e6ea", "#2d333d"),
    "accent": ("#2f6db5", "#7fb2ec"),
    "bad": ("#b3372f", "#ef8a80"),
    **{f"series-{number}": pair for number, pair in enumerate(_SERIES)},
    **{f"period-{number}": pair for number, pair in enumerate(_PERIODS)},
    "source-own": _SERIES[5],
    "source-sibling": _SERIES[2],
    "source-history": _SERIES[0],
    "source-run_ahead": _SERIES[3],
    "source-other": _SERIES[1],
    "source-unknown": _SERIES[4],
    "part-rollout": _SERIES[0],
    "part-update": _SERIES[1],
    "part-rest": ("#c3c9d1", "#4c5561"),
    "part-1": _SERIES[5],
    "part-2": _SERIES[3],
    "part-3": _SERIES[2],
    "part-4": ("#5fa3a8", "#7cc4c9"),
    "part-5": _SERIES[4],
    "bar-rollout": _SERIES[0],
    "bar-ahead": ("#9cbfe6", "#35608f"),
    "bar-environment": ("#e6d5a4", "#6a5d33"),
    "bar-update": _SERIES[1],
    "bar-weights": ("#1d2430", "#e4e8ee"),
}
