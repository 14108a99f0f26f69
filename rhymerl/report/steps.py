"""The file `steps.jsonl.gz` of a run directory: what each step did, for reports.

A line is a JSON object, of a step or of an evaluation. What is written at once is a member of the gzip file of its own,
so that a run that was killed leaves whole lines and at most a part of one.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rhymerl.errors import DataError
from rhymerl.folders import read_lines, writing
from rhymerl.types import Sample

STEPS = "steps.jsonl.gz"
MAX_TEXTS = 2_000  # of answers of a run, which a page can show
_LONGEST_LINE_BYTES = 64 * 2**20  # of tens of thousands of answers
_MAGIC = b"\x1f\x8b"
_LOG = logging.getLogger(__name__)


class StepFile:
    """Appends lines to `path`; `num_bytes` then says how long the file is.

    Save that number with the run's state and give it back: what was written later is cut off before the next line.
    """

    def __init__(self, path: str | Path, *, num_bytes: int = 0) -> None:
        self.path = Path(path)
        self.num_bytes = num_bytes
        self._is_cut = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line and hand it to the operating system."""
        line = json.dumps(record, separators=(",", ":"), default=str) + "\n"
        data = gzip.compress(line.encode(errors="backslashreplace"), compresslevel=6, mtime=0)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._is_cut:
                self._cut()
            with self.path.open("ab") as file:
                file.write(data)
        self.num_bytes += len(data)

    def _cut(self) -> None:
        found = self.path.stat().st_size if self.path.exists() else 0
        if found < self.num_bytes:
            _LOG.warning("%s lacks what the run had written: the report will have the steps from here on", self.path)
            self.num_bytes = 0
        if found:
            os.truncate(self.path, self.num_bytes)
        self._is_cut = True


def read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; a last one that a killed run has cut off is left out.

    Raises DataError naming the file when it is corrupt.
    """
    number = 0
    try:
        with gzip.open(path) as file:
            for line in read_lines(file, most_bytes=_LONGEST_LINE_BYTES):
                number += 1
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("not an object")
                yield record
    except EOFError:
        return
    except (OSError, ValueError, RecursionError, zlib.error) as error:
        if isinstance(error, gzip.BadGzipFile) and number and path.read_bytes()[-1:] == _MAGIC[:1]:
            return  # the first byte of a member, which gzip takes for no member at all
        raise DataError(f"{path}: line {number}: cannot be read: {error}") from error


def answer_columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return what is kept of each answer of a step, by column."""
    completions = [sample.completion for sample in samples]
    return {
        "prompt_id": [sample.prompt.id for sample in samples],
        "sample": [completion.request.sample for completion in completions],
        "reward": [round(sample.reward, 6) if sample.has_reward else None for sample in samples],
        "tokens": [sample.num_sampled for sample in samples],
        "passes": [completion.num_passes for completion in completions],
        "drafted": [completion.num_drafted for completion in completions],
        "accepted": [completion.num_accepted for completion in completions],
        "is_cut": [int(completion.output.is_cut) for completion in completions],
    }


def source_runs(sources: npt.NDArray[np.int8]) -> list[tuple[int, int]]:
    """Return tokens by origin: how many follow one another from each source."""
    if not len(sources):
        return []
    ends = np.flatnonzero(np.append(sources[1:] != sources[:-1], True)) + 1
    counts = np.diff(ends, prepend=0)
    return list(zip(counts.tolist(), sources[ends - 1].tolist(), strict=True))
