"""Reports: what a run left, as one page that needs nothing else."""

from rhymerl.report.page import write_report
from rhymerl.report.reading import read_run

__all__ = ["read_run", "write_report"]
