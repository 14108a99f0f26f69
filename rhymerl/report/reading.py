"""A run directory, read for a report: whatever of it there is."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rhymerl.backends.spans import WorkerSpan
from rhymerl.errors import DataError, UsageError
from rhymerl.history.files import read_sections
from rhymerl.history.packing import unpack
from rhymerl.history.similarity import similarity
from rhymerl.history.traces import TraceRecord, record_of_past
from rhymerl.progress import SILENT, ProgressBar
from rhymerl.report.answers import AnswerColumns
from rhymerl.report.base import Run, StepTimes
from rhymerl.report.curves import curves_of, read_tensorboard
from rhymerl.report.settings import flat_settings
from rhymerl.report.steps import STEPS, read_steps

_MOST_STEPS = 1_000  # of a timeline
_MOST_BYTES = 128 * 2**20  # of a history file
_MOST_TOKENS = 2_000_000  # of the history, for its similarity: a second's work


def read_run(path: str | Path, *, progress: ProgressBar = SILENT) -> Run:
    """Return the run in a directory; `progress` hears of each step.

    Raises UsageError for a directory that is none of a run, and DataError or ConfigError naming a file of it that
    cannot be read.
    """
    folder = Path(path)
    if not (folder / "config.yaml").is_file():
        raise UsageError(f"RUN={str(path)!r}: not the directory of a run (it has no config.yaml)")
    run = Run(
        path=folder,
        name=folder.resolve().name,
        settings=flat_settings(folder / "config.yaml"),
        summary=_summary(folder / "summary.json"),
    )
    run = (
        _with_steps(run, folder, progress)
        if (folder / STEPS).exists()
        else _with_tensorboard(run, folder / "tensorboard")
    )
    return _with_similarity(run, folder / "history.rhyme")


def _summary(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected a JSON object")
    return found


def _with_steps(run: Run, folder: Path, progress: ProgressBar) -> Run:
    steps: dict[int, Mapping[str, float]] = {}
    evaluations: dict[int, Mapping[str, float]] = {}
    times: deque[StepTimes] = deque(maxlen=_MOST_STEPS)
    warnings: list[tuple[int, str]] = []
    answers = AnswerColumns()
    began: list[float] = []
    facts: Mapping[str, str] = {}
    holding: Sequence[str] = ()
    try:
        for record in read_steps(folder / STEPS):
            if "evaluation" in record:
                evaluations[record["step"]] = record["evaluation"]
                continue
            steps[record["step"]] = record["metrics"]
            warnings += [(record["step"], words) for words in record["warnings"]]
            if "facts" in record:  # the first step after a start
                began.append(float(record["began_at"]))
                facts = {str(name): str(words) for name, words in record["facts"].items()}
            holding = [str(words) for words in record["holding"]]
            times.append(_times(record))
            answers.add(record)
            progress.advance()
        return replace(
            run,
            curves=curves_of(steps.items()),
            evaluations=curves_of(evaluations.items()),
            steps=list(times),
            warnings=warnings,
            holding=holding,
            facts=facts,
            began_at=began[0] if began else None,
            answers=answers.whole(),
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{folder / STEPS}: is not what a run writes there: {error!r}") from error


def _times(record: Mapping[str, Any]) -> StepTimes:
    spans = [
        WorkerSpan(worker=worker, activity=activity, number=number, start_s=start_s, end_s=end_s)
        for worker, activity, number, start_s, end_s in record["spans"]
    ]
    timing = {name: value for name, value in record["metrics"].items() if name.startswith("timing_s/")}
    return StepTimes(
        step=record["step"],
        ended_at=record["ended_at"],
        spans=spans,
        seconds={name.removeprefix("timing_s/"): value for name, value in timing.items()},
        workers_apart=record["workers_apart"],
    )


def _with_tensorboard(run: Run, folder: Path) -> Run:
    """A run without a record of its steps has its curves, if it has TensorBoard's."""
    curves = read_tensorboard(folder) if folder.is_dir() else {}
    note = f"There is no {STEPS} in the run directory, so there are no samples, no timeline and no acceptance by epoch."
    return replace(
        run,
        curves={name: curve for name, curve in curves.items() if not name.startswith("eval/")},
        evaluations={name: curve for name, curve in curves.items() if name.startswith("eval/")},
        step_name="optimizer step",
        missing=[note, *([] if curves else ["There are no curves of TensorBoard either."])],
    )


def _with_similarity(run: Run, path: Path) -> Run:
    if not path.exists():
        return run
    if path.stat().st_size > _MOST_BYTES:
        note = f"history.rhyme is larger than {_MOST_BYTES // 2**20} MiB, so its epochs have not been compared."
        return replace(run, missing=[*run.missing, note])
    sections = read_sections(path, tokenizer=None)
    try:
        records = _records(unpack(sections))
    except ValueError as error:
        raise DataError(f"history file {str(path)!r}: corrupt: {error}") from error
    return replace(run, similarity=similarity(records).by_epoch)


def _records(prompts: Sequence[Any]) -> list[TraceRecord]:
    """Return the answers of the training prompts that come first, as many as are worth the time."""
    found: list[TraceRecord] = []
    num_tokens = 0
    for prompt in prompts:
        if prompt.split != "train" or num_tokens > _MOST_TOKENS:
            continue
        for answer in prompt.answers:
            num_tokens += len(answer)
            found.append(record_of_past(answer, prompt.key, prompt.token_ids))
    return found
