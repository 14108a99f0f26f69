"""The charts of a report, as data that a page or a picture draws."""

from rhymerl.report.charts.base import Chart, Section, Series
from rhymerl.report.charts.sections import sections_of

__all__ = ["Chart", "Section", "Series", "sections_of"]
