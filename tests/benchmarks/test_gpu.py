"""`make gpu`, with other commands in the place of its parts: what is kept, and where it goes on."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rhymerl.config.compose import compose

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
# A part says something and writes a row, then waits if it is told to, and ends with its result.
PART = """
import json, os, sys, time
with open(os.environ["RHYMERL_BENCHMARK_ROWS"] + ".pid", "w") as file:
    file.write(str(os.getpid()))
with open(os.environ["RHYMERL_BENCHMARK_ROWS"], "a") as file:
    file.write(json.dumps({"number": sys.argv[1]}) + "\\n")
print("some words")
time.sleep(float(sys.argv[2]))
print(json.dumps({"of": sys.argv[1]}))
sys.exit(int(sys.argv[3]))
"""
DRIVER = """
import sys
from pathlib import Path
import gpu, os
parts = [gpu.Part(name=n, question="?", words=("-c", {part!r}, n, s, c), minutes=m)
         for n, s, c, m in [("one", "0", "0", 1), ("two", sys.argv[1], "0", 1), ("three", "0", "3", 1), ("four", "9", "0", 0.01)]]
gpu.Session(Path(sys.argv[2]), environment=gpu.environment(Path("site")), folder=Path(sys.argv[3])).run(parts)
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu")


def driver(folder: Path, wait_s: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", DRIVER.format(part=PART), wait_s, str(folder / "lines.jsonl"), str(folder / "work")]
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(BENCHMARKS)}, stdout=subprocess.DEVNULL)


def lines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "lines.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_it_goes_on_after_a_kill_and_keeps_what_was_found(tmp_path: Path) -> None:
    killed = driver(tmp_path, "60")
    deadline = time.monotonic() + 300
    while {"part": "two", "row": {"number": "two"}} not in lines(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    part = int((tmp_path / "work" / "two.rows.pid").read_text())
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    while Path(f"/proc/{part}").exists():  # it ends too: else it went on beside the next ones
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with (tmp_path / "lines.jsonl").open("a") as file:
        file.write('{"part": "two", "en')  # a line that a kill breaks off
    assert driver(tmp_path, "0").wait(600) == 0
    whole = [line for line in (tmp_path / "lines.jsonl").read_text().splitlines() if line != '{"part": "two", "en']
    found = [json.loads(line) for line in whole]
    began = [line["part"] for line in found if "began" in line]
    assert began == ["one", "two", "two", "three", "four"]
    ended = {line["part"]: line for line in found if "ended" in line}
    assert [ended[name]["ended"] for name in ("one", "two", "three")] == [0, 0, 3]
    assert ended["two"]["result"] == {"of": "two"}
    assert ended["four"]["ended"] == "out of time"
    assert ended["four"]["output"] == ["some words"]
    assert {"part": "four", "row": {"number": "four"}} in found
    assert driver(tmp_path, "60").wait(600) == 0  # nothing is left


def test_a_machine_without_a_gpu_says_what_would_run_and_what_is_missing(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--work", str(tmp_path), "--wheels", str(tmp_path / "wheels")]) == 2
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert said.startswith("make gpu would run tests, table-0.5B, draw, steps, ")
    assert "a GPU that torch sees" in said


def test_an_unknown_part_is_refused(gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--only", "tabel", "--work", str(tmp_path)])
    assert "table-0.5B" in capsys.readouterr().err


def test_parts_end_within_what_a_command_may_take(gpu: Any) -> None:
    parts = gpu.parts(argparse.Namespace(server=["a=b"], environment=["C=d"]))
    assert all(part.minutes < 9 for part in parts)
    assert sum(part.minutes for part in parts) <= 30
    for part in parts:
        if part.words[0].endswith(".py"):
            assert (ROOT / part.words[0]).is_file()
    assert {"tests/engine/test_device.py", "tests/sglang/test_gpu.py"} <= set(parts[0].words)


def test_what_parts_are_told_is_understood(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {part.words[0]: part.words[1:] for part in gpu.parts(argparse.Namespace(server=["a=b"], environment=[]))}
    arguments = importlib.import_module("sglang_throughput").parse(words["benchmarks/sglang_throughput.py"])
    assert (arguments.in_turns, arguments.server) == (True, ["a=b"])
    costs = next(part for part in gpu.parts(argparse.Namespace(server=[], environment=[])) if part.name == "costs")
    config = compose("bench_costs", costs.words[costs.words.index("--json") + 1 :])
    assert (list(config.measure.nodes), config.measure.rounds, config.model.init.hidden_size) == ([15], 1, 896)


def test_tests_are_told_what_the_machine_needs(gpu: Any, tmp_path: Path) -> None:
    found = gpu.environment(tmp_path, server=["attention_backend=triton", "x=true", "y=0.5"], variables=["A=b=1"])
    assert json.loads(found["RHYMERL_SGLANG_GPU"]) == {
        "arguments": {"attention_backend": "triton", "x": True, "y": 0.5},
        "environment": {"A": "b=1"},
    }
    assert (found["PYTHONUNBUFFERED"], found["HF_HUB_OFFLINE"]) == ("1", "1")
    assert found["PYTHONPATH"].split(os.pathsep)[:2] == [str(tmp_path), str(ROOT)]


def test_all_that_rhymerl_needs_is_looked_for(gpu: Any) -> None:
    """By the names of modules; tests need more."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split("[<>=]", each)[0] for each in project["dependencies"]}
    assert needed - {"hydra-core"} < set(gpu.PACKAGES)
    assert {"hydra", "sglang", "pytest"} < set(gpu.PACKAGES)
