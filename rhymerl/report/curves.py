"""The curves of a run: from what each step recorded, or from TensorBoard's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rhymerl.errors import DataError
from rhymerl.report.base import Curve

Points = dict[str, dict[int, float]]  # by name and step


def curves_of(rows: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, Curve]:
    """Return the curves of metrics by step."""
    points: Points = {}
    for step, metrics in rows:
        for name, value in metrics.items():
            points.setdefault(name, {})[step] = float(value)
    return _curves(points)


def read_tensorboard(folder: Path) -> dict[str, Curve]:
    """Return the curves in all event files of a folder.

    For steps that a resumed run has repeated, the newer values count. Raises DataError naming a file that cannot be
    read.
    """
    points: Points = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        try:
            for event in _events(path):
                _take(event, points)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
    return _curves(points)


def _events(path: Path) -> Iterable[Any]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    if not path.stat().st_size:
        return ()
    events: Iterable[Any] = LegacyEventFileLoader(str(path)).Load()
    return events


def _take(event: Any, points: Points) -> None:
    """Add the numbers of an event; the start of a session drops what comes from its step on."""
    if event.HasField("session_log"):
        for curve in points.values():
            for step in [step for step in curve if step >= event.step]:
                del curve[step]
    for value in event.summary.value:
        if value.WhichOneof("value") == "simple_value":
            points.setdefault(value.tag, {})[event.step] = value.simple_value


def _curves(points: Points) -> dict[str, Curve]:
    return {name: dict(sorted(curve.items())) for name, curve in points.items() if curve}
