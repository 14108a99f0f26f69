"""Runs the parts of `gpu.py` one after another, writes down how each ended, and knows which need not run again."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.gpu.parts import ROOT, Part

STOP_S = 10.0
VERSIONS = ("torch", "triton", "transformers", "sglang")  # of packages that figures depend on, where a part needs them


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A part from its beginning on; `ended` is None where something has cut it off."""

    part: str
    card: str
    digest: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    ended: int | str | None = None

    def is_of(self, part: Part, card: str, digest: str) -> bool:
        return (self.part, self.card, self.digest) == (part.name, card, digest)


class Runner:
    """The parts on one card. A line of the file is a JSON object; the rows of a part stand before its end."""

    def __init__(self, file: Path, *, environment: Mapping[str, str], folder: Path, card: str) -> None:
        self.file = file
        self.environment = environment
        self.folder = folder  # for rows and outputs
        self.card = card

    def attempts(self, part: Part) -> list[Attempt]:
        """Return the attempts at the part as it is now, on this card, in whatever checkout; the oldest first."""
        now = digest(part)
        return [each for each in attempts_in(self.file) if each.is_of(part, self.card, now)]

    def is_done(self, part: Part) -> bool:
        return any(each.ended == 0 for each in self.attempts(part))

    def run(
        self,
        chosen: Sequence[Part],
        *,
        again: Sequence[str] = (),
        minutes: float = float("inf"),
        warm_up: Sequence[str] = (),
    ) -> None:
        """Run the parts that are left, as long as they fit into so many minutes.

        Those that have failed before come last, and with them those that are in vain without their rows. `warm_up` is a
        command that runs beside them, if one of them compiles.
        """
        ends = time.monotonic() + 60 * minutes
        left = [part for part in chosen if part.name in again or not self.is_done(part)]
        left.sort(key=lambda part: part.name not in again and self._comes_last(part, chosen))
        with self._beside(warm_up if any(part.compiles for part in left) else ()):
            for part in left:
                if time.monotonic() + part.seconds > ends:
                    say(f"{part.name}: left, because its {part.seconds:g} seconds do not fit any more")
                elif self._is_in_vain(part, chosen):
                    say(f"{part.name}: left, because {part.only_after} has no rows")
                else:
                    say(f"{part.name}: {part.question}")
                    self._run(part, known=[] if part.name in again else self._known_rows(part))

    def _comes_last(self, part: Part, chosen: Sequence[Part]) -> bool:
        return any(each.ended is not None for each in self.attempts(part)) or self._is_in_vain(part, chosen)

    def _is_in_vain(self, part: Part, chosen: Sequence[Part]) -> bool:
        """Return whether the part before it was tried, in this order, and gave nothing."""
        before = [self.attempts(each) for each in chosen if each.name == part.only_after]
        return any(tried and not any(each.rows for each in tried) for tried in before)

    def _known_rows(self, part: Part) -> list[dict[str, Any]]:
        """Return the rows that it need not take again, the newest first."""
        return [row for each in reversed(self.attempts(part)) for row in reversed(each.rows)]

    @contextmanager
    def _beside(self, words: Sequence[str]) -> Iterator[None]:
        if not words:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "warm-up.out").open("w") as file:
            process = self._start(words, file, self.environment)
        try:
            yield
        finally:
            _end(process)

    def _start(self, words: Sequence[str], output: Any, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=record.dying_with(os.getpid()),
        )

    def _run(self, part: Part, *, known: Sequence[Mapping[str, Any]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        rows, output, before = (self.folder / f"{part.name}.{ending}" for ending in ("rows", "out", "known"))
        rows.unlink(missing_ok=True)
        before.write_text("".join(json.dumps(row) + "\n" for row in known))
        judged = {"card": self.card, "digest": digest(part), "commit": record.commit()}
        self.write({"part": part.name, "began": time.strftime("%Y-%m-%dT%H:%M:%S"), **judged})
        begun, told = time.monotonic(), 0
        with output.open("w") as file:
            process = self._start(
                part.words, file, {**self.environment, record.ROWS: str(rows), record.KNOWN: str(before)}
            )
            try:
                while process.poll() is None and time.monotonic() - begun < part.seconds:
                    time.sleep(0.2)
                    told = self._tell(part, rows, told)
                code = process.poll()
            finally:
                _end(process)
        self._tell(part, rows, told)
        taken = round(time.monotonic() - begun, 1)
        words = output.read_text(errors="replace").replace(f"{ROOT}/", "").splitlines()
        result = _json_of(words[-1]) if words else None
        last = {"result": result} if result is not None else {"output": words[-20:]}
        ended = "out of time" if code is None else code
        self.write({"part": part.name, "ended": ended, "seconds": taken, **judged, **last})

    def _tell(self, part: Part, rows: Path, told: int) -> int:
        """Copy the rows that are new; returns how many there are."""
        lines = rows.read_text().splitlines() if rows.exists() else []
        found = [row for row in map(_json_of, lines) if row is not None]
        for row in found[told:]:
            self.write({"part": part.name, "row": row})
        return len(found)

    def write(self, line: Mapping[str, Any]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        broken = self.file.exists() and not self.file.read_bytes().endswith(b"\n") and self.file.stat().st_size
        with self.file.open("a") as file:
            file.write(("\n" if broken else "") + json.dumps(line) + "\n")
        say(json.dumps(line))


def attempts_in(file: Path) -> list[Attempt]:
    """Return all attempts in a file, the oldest first; a line that a kill has broken off is no line."""
    found: list[Attempt] = []
    for text in file.read_text().splitlines() if file.exists() else []:
        line = _json_of(text) or {}
        if "began" in line:
            found.append(Attempt(part=line["part"], card=line.get("card", ""), digest=line.get("digest", "")))
        elif "row" in line and found and found[-1].part == line["part"]:
            found[-1].rows.append(line["row"])
        elif "ended" in line and found and found[-1].part == line["part"]:
            found[-1] = replace(found[-1], ended=line["ended"])
    return found


def digest(part: Part) -> str:
    """Return a digest of what its figures depend on: judged files, its command, and its packages' versions."""
    versions = record.versions([name for name in VERSIONS if name in part.needs])
    what = [part.words, versions, [(name, _blob(ROOT / name)) for name in files_of(part.judges)]]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def files_of(paths: Sequence[str]) -> list[str]:
    """Return the tracked files below the paths; all files where git knows of none, as in an unpacked archive."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z", "--", *paths], cwd=ROOT, capture_output=True, text=True)
        tracked = listed.stdout.split("\0") if listed.returncode == 0 else []
    except OSError:
        tracked = []
    known = {name for name in tracked if name and (ROOT / name).is_file()}
    found = set(known)
    for path in paths:
        if not any(name == path or name.startswith(f"{path}/") for name in known):
            found |= {str(file.relative_to(ROOT)) for file in _walk(ROOT / path)}
    return sorted(found)


def _walk(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts]


def _blob(file: Path) -> str:
    """Return the name that git gives to the content."""
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with all that it has started."""
    for sign, patience in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def _json_of(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def say(line: str) -> None:
    print(line, flush=True)
