"""The charts of a report, as data that a page or a picture draws."""

from collections.abc import Sequence

from rhymerl.report.base import Run
from rhymerl.report.charts.base import Chart, Series
from rhymerl.report.charts.drafts import draft_charts
from rhymerl.report.charts.health import health_charts
from rhymerl.report.charts.history import history_charts
from rhymerl.report.charts.learning import learning_charts
from rhymerl.report.charts.times import time_charts

__all__ = ["Chart", "Series", "sections_of"]


def sections_of(runs: Sequence[Run]) -> dict[str, list[Chart]]:
    """Return the charts by the titles of sections, without charts and sections that have nothing to show."""
    charts = {
        "Learning": learning_charts(runs),
        "Health": health_charts(runs),
        "Drafts": draft_charts(runs),
        "Time": time_charts(runs),
        "History": history_charts(runs),
    }
    shown = {title: [chart for chart in each if chart.series] for title, each in charts.items()}
    return {title: each for title, each in shown.items() if each}
