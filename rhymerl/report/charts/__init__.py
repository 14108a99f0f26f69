"""The charts of a report, as data that a page or a picture draws."""

from collections.abc import Sequence

from rhymerl.report.base import Run
from rhymerl.report.charts.base import Chart, Section, Series
from rhymerl.report.charts.drafts import draft_charts
from rhymerl.report.charts.health import health_charts
from rhymerl.report.charts.history import history_charts
from rhymerl.report.charts.learning import learning_charts
from rhymerl.report.charts.times import time_charts

__all__ = ["Chart", "Section", "Series", "sections_of"]


def sections_of(runs: Sequence[Run]) -> list[Section]:
    """Return the sections that have anything to show, without charts that have nothing."""
    charts = {
        "Learning": learning_charts(runs),
        "Health": health_charts(runs),
        "Drafts": draft_charts(runs),
        "Time": time_charts(runs),
        "History": history_charts(runs),
    }
    shown = {title: [chart for chart in each if chart.series] for title, each in charts.items()}
    return [Section(id=title.lower(), title=title, charts=each) for title, each in shown.items() if each]
