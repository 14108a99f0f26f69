"""The page of a report: one HTML file that loads nothing.

Text of models and data gets into it by two ways only: through the template, which escapes it, and as compressed data in
base64, which the page's script puts in as text.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from rhymerl.folders import replacing
from rhymerl.progress import SILENT, ProgressBar
from rhymerl.report.base import Live, Run
from rhymerl.report.charts import sections_of
from rhymerl.report.charts.base import thinned
from rhymerl.report.colours import COLOURS
from rhymerl.report.figures import evaluation_figures, header_of, key_figures, parts_of, problems_of
from rhymerl.report.reading import read_run
from rhymerl.report.samples import sample_data
from rhymerl.report.settings import differences, side_by_side
from rhymerl.report.steps import MAX_TEXTS
from rhymerl.report.timeline import timeline_of
from rhymerl.version import __version__

REPORT = "report.html"
MAX_ANSWERS = 200_000  # rows of the index
_SCRIPTS = ("page.js", "charts.js", "samples.js")


def write_report(paths: Sequence[str | Path], out: str | Path, *, progress: ProgressBar = SILENT) -> list[Run]:
    """Write the page of the runs in these directories to `out`; returns the runs.

    Raises what `read_run` raises before anything is written, and RunError where the page cannot be.
    """
    with progress.during("steps read"):
        runs = with_distinct_names([read_run(path, progress=progress) for path in distinct(paths)])
    with progress.during("drawing the page"):
        page = page_of(runs)
    with replacing(Path(out)) as part:
        part.write_text(page, encoding="utf-8", errors="backslashreplace")
    return runs


def distinct(paths: Sequence[str | Path]) -> list[Path]:
    """Return the directories; one that is named twice is one run."""
    return list({Path(path).resolve(): Path(path) for path in paths}.values())


def with_distinct_names(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, by their whole paths where directories have the same name."""
    names = [run.name for run in runs]
    return [replace(run, name=str(run.path)) if names.count(run.name) > 1 else run for run in runs]


def page_of(runs: Sequence[Run], *, live: Live | None = None) -> str:
    """Return the HTML of a report on these runs; `live` where it is made anew while they go on."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    sections = list(sections_of(runs).items())
    timelines = [(run.name, timeline) for run in runs if (timeline := timeline_of(run)) is not None]
    share = max(len(runs), 1)
    samples = [
        {"run": run.name, **sample_data(run.answers, max_answers=MAX_ANSWERS // share, max_texts=MAX_TEXTS // share)}
        for run in runs
        if run.answers is not None
    ]
    data = {
        "charts": {chart.id: asdict(chart) for _, charts in sections for chart in charts},
        "timelines": [{"run": name, "kinds": timeline.kinds, **asdict(timeline)} for name, timeline in timelines],
        "metrics": [{"run": run.name, "step": run.step_name, "curves": _all_curves(run)} for run in runs],
        "samples": samples,
    }
    return template.from_string(_asset("page.html")).render(
        runs=runs,
        live=live,
        headers=[header_of(run) for run in runs],
        parts=[parts_of(run) for run in runs],
        problems=[problems_of(run) for run in runs],
        sections=sections,
        timelines=[(name, timeline.kinds) for name, timeline in timelines],
        has_metrics=any(run.curves for run in runs),
        samples=samples,
        figures=key_figures(runs),
        evaluations=evaluation_figures(runs),
        settings=side_by_side([run.settings for run in runs]),
        differences=differences([run.settings for run in runs]),
        colours=COLOURS,
        style=_asset("page.css"),
        scripts=[_asset(name) for name in _SCRIPTS],
        data=packed(_json(data)),
        library=packed(get_plotlyjs()),
        version=__version__,
    )


def packed(text: str) -> str:
    """Return text as compressed base64, in which nothing is markup."""
    return base64.b64encode(gzip.compress(text.encode(errors="backslashreplace"), 6, mtime=0)).decode()


def _json(data: Any) -> str:
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:  # the slow way, for what has diverged
        return json.dumps(finite(data), separators=(",", ":"), allow_nan=False)


def finite(value: Any) -> Any:
    """Return plain data in which numbers that JSON does not have are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def _asset(name: str) -> str:
    return (files("rhymerl.report") / "assets" / name).read_text(encoding="utf-8")


def _all_curves(run: Run) -> dict[str, Any]:
    curves = {name: thinned(curve) for name, curve in sorted({**run.curves, **run.evaluations}.items())}
    return {name: [list(curve), list(curve.values())] for name, curve in curves.items()}
