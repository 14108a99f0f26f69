"""`make gpu` with stand-ins for its parts: what it keeps, where it resumes, what it prints; and itself on a CPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.gpu import gpu
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu import runner as gpu_runner
from benchmarks.gpu import site as gpu_site

ROOT = Path(__file__).parents[2]
SMALL = ["machine", "passes", "engine", "drafts", "update", "peer", "fsdp2", "embedded"]
# A part writes the rows that it has not yet, says something, waits if it is told to, and ends with its result.
PART = """
import json, os, sys, time
from benchmarks import record
name = sys.argv[1]
with open(os.environ["RHYMERL_BENCHMARK_ROWS"] + ".pid", "w") as file:
    file.write(str(os.getpid()))
def measure(number):
    if number == 2:
        time.sleep(float(os.environ.get("WAIT_" + name, "0")))
    return {"of": name, "by": os.getpid()}
record.rows_of([{"number": 1}, {"number": 2}], measure)
print("some words")
time.sleep(float(sys.argv[3]))
print(json.dumps({"of": name}))
sys.exit(int(sys.argv[2]))
"""
DRIVER = """
import sys
from pathlib import Path
from benchmarks.gpu import parts as gpu_parts, runner
parts = [gpu_parts.Part(name=n, question="?", words=("-c", {part!r}, n, code, wait), seconds=s, judges=("benchmarks/record.py",))
         for n, code, wait, s in [("one", "0", "0", 60), ("two", "0", "0", 60), ("three", "3", "0", 60), ("four", "0", "9", 3)]]
runner.Runner(Path(sys.argv[1]), environment={environment!r}, folder=Path(sys.argv[2]), card="C").run(parts)
"""


@pytest.fixture
def runner(tmp_path: Path) -> Callable[..., Any]:
    def runner(card: str = "C", **variables: str) -> Any:
        given = {"environment": {**os.environ, **variables}, "folder": tmp_path / "work", "card": card}
        return gpu_runner.Runner(tmp_path / "lines.jsonl", **given)

    return runner


@pytest.fixture
def part() -> Callable[..., Any]:
    def part(name: str, *, code: int = 0, **more: Any) -> Any:
        words = ("-c", PART, name, str(code), "0")
        return gpu_parts.Part(name=name, question="?", words=words, **{"seconds": 60, **more})

    return part


def driver(folder: Path, *, wait_s: str = "0", root: Path = ROOT) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(root), "WAIT_two": wait_s}
    words = [sys.executable, "-c", DRIVER.format(part=PART, environment=environment)]
    files = [str(folder / "lines.jsonl"), str(folder / "work")]
    return subprocess.Popen([*words, *files], cwd=root, env=environment, stdout=subprocess.DEVNULL)


def lines(folder: Path, name: str = "lines.jsonl") -> list[dict[str, Any]]:
    """Without those that a kill has broken off."""
    file = folder / name
    whole = [line for line in (file.read_text().splitlines() if file.exists() else []) if line.endswith("}")]
    return [json.loads(line) for line in whole]


def rows(folder: Path, name: str) -> list[int]:
    return [line["row"]["number"] for line in lines(folder) if "row" in line and line["part"] == name]


def checkout(folder: Path) -> Path:
    """The files of this tree that parts run, without git."""
    for name in ("benchmarks", "rhymerl"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("results", "traces", "__pycache__"))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("earlier", "__pycache__"))
    return folder


# -- what is kept
# --------------------------------------------------------------------------------------------------------


def test_it_goes_on_after_a_kill_with_the_rows_that_are_left_and_in_another_checkout(tmp_path: Path) -> None:
    killed = driver(tmp_path, wait_s="60")
    deadline = time.monotonic() + 300
    while rows(tmp_path, "two") != [1]:
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
    assert driver(tmp_path, root=checkout(tmp_path / "other")).wait(600) == 0
    found = lines(tmp_path)
    assert [line["part"] for line in found if "began" in line] == ["one", "two", "two", "three", "four"]
    assert rows(tmp_path, "one") == rows(tmp_path, "two") == [1, 2]
    ended = {line["part"]: line for line in found if "ended" in line}
    assert [ended[name]["ended"] for name in ("one", "two", "three")] == [0, 0, 3]
    assert ended["two"]["result"] == {"of": "two"}
    assert ended["four"]["ended"] == "out of time"
    assert ended["four"]["output"] == ["some words"]
    assert rows(tmp_path, "four") == [1, 2]


def test_what_is_done_is_not_done_again_and_what_has_failed_comes_last(
    runner: Callable[..., Any], part: Callable[..., Any], tmp_path: Path
) -> None:
    parts = [part("one", code=3), part("two"), part("three")]
    runner().run(parts[:2])
    runner().run(parts)
    assert [line["part"] for line in lines(tmp_path) if "began" in line] == ["one", "two", "three", "one"]
    assert rows(tmp_path, "one") == [1, 2], "rows of a part that failed are not taken again"
    runner().run(parts[1:], again=["two"])
    assert rows(tmp_path, "two") == [1, 2, 1, 2]
    assert runner().is_done(parts[1])
    assert not runner().is_done(parts[0])


def test_figures_are_of_a_card_a_command_and_the_code_that_they_judge(
    runner: Callable[..., Any],
    part: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "judged" / "__pycache__").mkdir(parents=True)
    judged = tmp_path / "judged" / "code.py"
    judged.write_text("1")
    monkeypatch.setattr(gpu_runner, "ROOT", tmp_path)
    one = part("one", judges=("judged",))
    runner().run([one])
    (tmp_path / "judged" / "__pycache__" / "code.pyc").write_text("compiled")
    assert runner().is_done(one)
    assert not runner("another card").is_done(one)
    assert not runner().is_done(part("one", code=1, judges=("judged",)))
    judged.write_text("2")
    assert not runner().is_done(one)
    judged.write_text("1")
    assert runner().is_done(one)


def test_content_is_the_same_with_git_and_without(tmp_path: Path) -> None:
    other = checkout(tmp_path / "other")
    script = (
        "import json; from benchmarks.gpu import parts, runner;"
        "print(json.dumps([runner.digest(each) for each in parts.parts()]))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=other, capture_output=True, text=True)
    assert json.loads(done.stdout) == [gpu_runner.digest(each) for each in gpu_parts.parts()]


def test_a_part_in_vain_is_left_until_the_one_before_it_has_rows(
    runner: Callable[..., Any], part: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-c", "import os; assert 'BROKEN' not in os.environ\n" + PART, "first", "0", "0")
    chosen = [replace(part("first"), words=words), part("second", only_after="first"), part("third")]
    runner(BROKEN="1").run(chosen)
    assert "second: left, because first has no rows" in capsys.readouterr().out
    runner().run([*chosen, part("fourth")])
    began = [line["part"] for line in lines(tmp_path) if "began" in line]
    assert began == ["first", "third", "fourth", "first", "second"]


def test_what_ran_out_of_time_with_rows_keeps_nobody_waiting(
    runner: Callable[..., Any], part: Callable[..., Any], tmp_path: Path
) -> None:
    chosen = [part("first", seconds=3), part("second", only_after="first")]
    runner(WAIT_first="60").run(chosen[:1])
    runner().run(chosen)
    assert [line["part"] for line in lines(tmp_path) if "began" in line] == ["first", "second", "first"]


def test_no_part_begins_that_may_not_fit(
    runner: Callable[..., Any], part: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner().run([part("long", seconds=90), part("short", seconds=30)], minutes=1)
    assert "long: left, because its 90 seconds do not fit any more" in capsys.readouterr().out
    assert [line["part"] for line in lines(tmp_path) if "began" in line] == ["short"]


def test_a_compiler_works_beside_parts_that_need_it_and_ends_with_them(
    runner: Callable[..., Any], part: Callable[..., Any], tmp_path: Path
) -> None:
    name = tmp_path / "pid"
    warm_up = ("-c", f"import os, time; open({str(name)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    runner().run([part("one")], warm_up=warm_up)
    assert not name.exists()
    runner(WAIT_two="1").run([part("two", compiles=True)], warm_up=warm_up)
    assert not Path(f"/proc/{name.read_text()}").exists()


# -- what is said
# --------------------------------------------------------------------------------------------------------


def test_a_bare_python_says_the_order_the_limits_and_what_is_missing(tmp_path: Path) -> None:
    words = [sys.executable, "-S", "-E", "-m", "benchmarks.gpu.gpu", "--lease", "15", "--work", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    first, *told, last = done.stdout.splitlines()
    assert first.endswith("what is left of 15 minutes:")
    assert [line.split()[1] for line in told[:4]] == ["machine", "draw", "passes", "tests"]
    assert "machine          15 s  what does the GPU itself do? (lacks a GPU, torch)" in told[0]
    assert ["left, unless" in line for line in told] == [False] * 10 + [True] * (len(told) - 10)
    assert "sglang" in told[6]
    assert last.startswith("None of them can run here")
    assert not list(tmp_path.rglob("*.jsonl"))


def test_parts_that_lack_something_are_left_out_and_the_others_run(
    part: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = {"needs_gpu": False}
    known = [part("one", needs=("nowhere",), **here), part("two", compiles=True, **here), part("three")]
    monkeypatch.setattr(gpu_parts, "parts", lambda **_: known)
    monkeypatch.setattr(gpu, "WARM_UP", ("-c", "pass"))
    monkeypatch.setattr(gpu, "card", lambda variables: None)
    given = ["--work", str(tmp_path / "work"), "--out", str(tmp_path), "--hardware", "h", "--wheels", str(tmp_path)]
    assert gpu.main([*given, "--lease", "3"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1:4] == [
        "  1  one      60 s  ? (lacks nowhere)",
        "  2  two      60 s  ?",
        "  3  three    60 s  ? (lacks a GPU)",
    ]
    assert [line["part"] for line in lines(tmp_path, "gpu_h.jsonl") if "ended" in line] == ["two"]
    assert gpu.main([*given, "--only", "two"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "  1  two    60 s  ? (done)"
    assert gpu.main([*given, "--only", "one"]) == 2
    assert gpu.main([*given, "--only", "two", "--again", "two", "--plan"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "  1  two    60 s  ?"


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--only", "tabel"])
    assert "table-0.5B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
    ],
)
def test_a_file_is_named_by_the_card(name: str, expected: str) -> None:
    assert gpu_site.short(name) == expected


def test_a_broken_wheel_costs_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    (wheels / "broken-1-py3-none-any.whl").write_bytes(b"half of it")
    for name in ("whole_a", "whole_b"):
        with zipfile.ZipFile(wheels / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "")
            about = f"{name}-1.dist-info"
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    unpack = gpu_site.unpack
    unpack(wheels, site)
    assert {each.name for each in site.glob("*.py")} == {"whole_a.py", "whole_b.py"}
    said = capfd.readouterr().out
    assert "broken-1-py3-none-any.whl: cannot be installed; parts that need it are left out" in said
    unpack(wheels, site)
    assert "cannot be installed" not in capfd.readouterr().out, "it has been tried"


def test_a_tree_without_git_has_the_commit_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert record.commit() == "unknown"
    monkeypatch.setenv(record.COMMIT, "abc")
    assert record.commit() == "abc"


# -- the command itself, on a CPU
# ---------------------------------------------------------------------------------------


def command(root: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    given = ["--on-cpu", "--out", str(folder), "--work", str(folder / "work"), "--wheels", str(folder / "wheels")]
    whole = [sys.executable, "-m", "benchmarks.gpu.gpu", *given, *words]
    return subprocess.run(whole, cwd=root, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_goes_on_in_another_checkout_with_the_rows_that_a_kill_has_left(tmp_path: Path) -> None:
    file = tmp_path / "gpu_cpu.jsonl"
    assert command(ROOT, tmp_path, "--only", "machine", "passes").returncode == 0
    whole = file.read_text().splitlines()
    first = next(number for number, line in enumerate(whole) if '"passes", "row"' in line)
    file.write_text("\n".join(whole[: first + 1]) + "\n")
    done = command(checkout(tmp_path / "other"), tmp_path, "--only", "machine", "passes")
    assert done.returncode == 0, done.stdout + done.stderr
    found = lines(tmp_path, file.name)
    assert [line["part"] for line in found if "began" in line] == ["machine", "passes", "passes"]
    taken = [line["row"]["tokens"] for line in found if "row" in line and line["part"] == "passes"]
    assert taken == [1, 4, 8]
    assert [row["tokens"] for row in found[-1]["result"]["rows"]] == [1, 4, 8]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_parts_without_sglang_run_on_a_cpu(tmp_path: Path) -> None:
    done = command(ROOT, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    ended = [line for line in lines(tmp_path, "gpu_cpu.jsonl") if "ended" in line]
    assert [(line["part"], line["ended"]) for line in ended] == [(name, 0) for name in SMALL], done.stdout
    assert "table-0.5B" in done.stdout
