"""Runs that are watched: their page follows what they write, on this machine alone, until they have ended."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest

from rhymerl.cli import main
from rhymerl.folders import RunFolder
from rhymerl.report.steps import STEPS, StepFile
from rhymerl.report.watch import WatchServer
from tests.report.directories import CONFIG, data_of, make_run, step_record


class Got(NamedTuple):
    status: int
    refresh: str | None  # seconds
    text: str

    @property
    def comes_again(self) -> bool:
        """Whether a browser loads it again: after ten seconds, or later where the machine is slow."""
        return self.refresh is not None and 10 <= int(self.refresh) < 600

    @property
    def live(self) -> str:
        """What it says of runs that are watched, without its links."""
        found = re.search(r'<p class="live">(.*?)</p>', self.text, re.DOTALL)
        assert found is not None
        return " ".join(re.sub("<[^>]*>", "", found[1]).split())

    @property
    def missing(self) -> list[str]:
        found = re.findall(r'<p class="missing">(.*?)</p>', self.text)
        return [each for each in found if "need JavaScript" not in each]


def get(server: WatchServer, where: str = "/", *, host: str | None = None) -> Got:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", where, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    got = Got(answer.status, answer.headers["Refresh"], answer.read().decode())
    connection.close()
    return got


@contextmanager
def watching(*runs: Path) -> Iterator[WatchServer]:
    with WatchServer(runs) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def rewards_in(got: Got) -> list[float]:
    curves = data_of(got.text)["metrics"][0]["curves"]
    return curves["reward"][1] if "reward" in curves else []


def record(step: int) -> dict[str, object]:
    return step_record(step, prompts=4, group=2, words="4+4=8")


def test_a_page_follows_its_run_from_before_its_first_step_to_its_end(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    folder = RunFolder(run)
    with folder:
        folder.open()
        with watching(run) as server:
            begins = get(server)
            assert (begins.status, begins.comes_again) == (200, True)
            assert begins.live.startswith("mine has not ended its first step. Read at ")
            (run / "config.yaml").write_text(CONFIG.format(seed=0, clip=0.2))
            file = StepFile(run / STEPS)
            for step in (1, 2):
                file.append(record(step))
                got = get(server)
                assert rewards_in(got) == [0.1, 0.2][:step]
                assert got.comes_again
                assert got.live.startswith(f"mine goes on, after {step} step")
            assert "algo.clip_high" in got.text
            assert get(server, "/?hold").refresh is None, "a page that is held"
            folder.__exit__()
            ended = get(server)
            assert (ended.status, ended.refresh) == (200, None)
            assert ended.live.startswith("mine has ended, after 2 steps. ")
            assert ended.live.endswith("this page does not change any more.")


def test_half_a_line_is_left_out_and_a_damaged_file_is_said_until_it_is_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", num_steps=2)
    whole = (run / STEPS).read_bytes()
    with RunFolder(run), watching(run) as server:
        file = StepFile(run / STEPS, num_bytes=len(whole))
        file.append(record(3))
        longer = (run / STEPS).read_bytes()
        for end in (len(whole) + 1, len(whole) + 20, (len(whole) + len(longer)) // 2):
            (run / STEPS).write_bytes(longer[:end])
            assert rewards_in(get(server)) == [0.1, 0.2]
            assert get(server).missing == []
        (run / STEPS).write_bytes(b"x" + longer[1:])
        damaged = get(server)
        assert f"{STEPS}: line 0: cannot be read" in damaged.missing[0]
        assert damaged.comes_again
        (run / STEPS).write_bytes(longer)
        assert len(rewards_in(get(server))) == 3
        shutil.rmtree(run)
        assert "not the directory of a run" in get(server).missing[0]


def test_runs_side_by_side_of_which_one_goes_on(tmp_path: Path) -> None:
    ended = make_run(tmp_path / "one", seed=1)
    other = make_run(tmp_path / "other", num_steps=3)
    with RunFolder(other), watching(ended, other, ended) as server:
        got = get(server)
        assert got.live.startswith("one has ended, after 6 steps. other goes on, after 3 steps. ")
        assert got.comes_again
        assert [each["run"] for each in data_of(got.text)["metrics"]] == ["one", "other"]
        assert "Settings that differ" in got.text


def test_a_killed_run_has_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    hold = f"from pathlib import Path; from rhymerl.folders import RunFolder; RunFolder(Path({str(run)!r})).__enter__(); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE) as process, watching(run) as server:
        while not (run / "run.lock").exists():
            assert process.poll() is None
        assert get(server).comes_again
        process.kill()
        process.wait()
        assert (run / "run.lock").exists()
        assert get(server).refresh is None


def test_nothing_is_made_anew_where_nothing_has_changed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    with RunFolder(run), watching(run) as server:
        seen = {id(server.runs.page()[0]) for _ in range(3)}
        assert len(seen) == 1
        (run / "summary.json").write_text(json.dumps({"steps": 7}))
        assert id(server.runs.page()[0]) not in seen


def test_only_the_page_and_only_by_a_name_of_this_machine(tmp_path: Path) -> None:
    with watching(make_run(tmp_path / "mine")) as server:
        assert server.server_address[0] == "127.0.0.1"
        for host, where, status in (
            ("127.0.0.1:1", "/", 200),
            ("localhost", "/?hold", 200),
            ("evil.example", "/", 403),
            ("localhost.evil.example:80", "/", 403),
            ("", "/", 403),
            ("[", "/", 403),
            ("localhost", "/favicon.ico", 404),
            ("localhost", "/../mine/config.yaml", 404),
        ):
            assert get(server, where, host=host).status == status, (host, where)


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, empty = make_run(tmp_path / "mine"), tmp_path / "empty"
    empty.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, told in (
            ([], "rhymerl watch needs RUN"),
            ([str(empty)], f"RUN={str(empty)!r}: not the directory of a run (it has no config.yaml)"),
            ([str(run), str(tmp_path / "none")], "not the directory of a run"),
            ([str(run / "config.yaml")], "not the directory of a run"),
            ([str(run), "port=x"], "port=x: expected 0 to 65535"),
            ([str(run), "port=70000"], "port=70000: expected 0 to 65535"),
            ([str(run), f"port={port}"], f"port={port}: nothing can be served there"),
        ):
            assert main(["watch", *words]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert told in line
