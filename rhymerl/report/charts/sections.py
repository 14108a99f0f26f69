"""The sections of a report, in their order."""

from __future__ import annotations

from collections.abc import Sequence

from rhymerl.report.base import Run
from rhymerl.report.charts.base import Section
from rhymerl.report.charts.drafts import draft_charts
from rhymerl.report.charts.history import history_charts
from rhymerl.report.charts.learning import learning_charts
from rhymerl.report.charts.times import time_charts


def sections_of(runs: Sequence[Run]) -> list[Section]:
    """Return the sections that have anything to show."""
    found = [
        Section(id="learning", title="Learning", charts=learning_charts(runs)),
        Section(id="drafts", title="Drafts", charts=draft_charts(runs)),
        Section(id="time", title="Time", charts=time_charts(runs)),
        Section(id="history", title="History", charts=history_charts(runs)),
    ]
    return [section for section in found if section.charts]
