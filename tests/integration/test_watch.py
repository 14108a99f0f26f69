"""`rhymerl watch` beside a run of the command line: from before its first step to its end, and to Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import time
from http.client import HTTPConnection
from pathlib import Path

from tests.integration import programs
from tests.report.directories import data_of


def steps_in(page: str) -> int:
    curves = data_of(page)["metrics"][0]["curves"]
    return len(curves["reward"][1]) if "reward" in curves else 0


def test_a_run_is_watched_to_its_end(settings: list[str], tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "watch.txt"
    fit = programs.start([*settings, "update.mini_batches=1", f"run_dir={run}"], tmp_path / "fit.txt")
    while not (run / "run.lock").exists():
        assert fit.is_alive(), (tmp_path / "fit.txt").read_text()
        time.sleep(0.01)
    watch = programs.start(["watch", str(run)], output)
    try:
        while not (
            found := re.search(
                r"at http://127.0.0.1:(\d+)/ until Ctrl-C", output.read_text() if output.exists() else ""
            )
        ):
            assert watch.is_alive(), output.read_text()
            time.sleep(0.01)
        connection = HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
        seen: list[tuple[int, bool]] = []  # steps in the page, and whether it comes again
        while not seen or seen[-1][1]:
            connection.request("GET", "/")
            answer = connection.getresponse()
            assert answer.status == 200
            page = answer.read().decode()
            assert "cannot be read" not in page
            seen.append((steps_in(page), answer.headers["Refresh"] is not None))
            time.sleep(0.2)
        connection.close()
        fit.join()
        assert fit.exitcode == 0
        assert [steps for steps, _ in seen] == sorted(steps for steps, _ in seen)
        assert any(0 < steps < 12 for steps, _ in seen), "it was seen in between"
        assert seen[-1][0] == 12
        assert "run has ended, after 12 steps." in page
    finally:
        assert watch.pid is not None
        os.kill(watch.pid, signal.SIGINT)
        watch.join(30)
        fit.join()
    assert watch.exitcode == 130
    assert output.read_text().splitlines()[1:] == ["interrupted"]
