"""`make gpu`: with other commands in the place of its parts, what is kept and where it goes on; and its parts as small as on a CPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rhymerl.config.compose import compose
from rhymerl.engine.emulation import EmulatedDevice

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
# A part writes the rows that it has not yet, says something, waits if it is told to, and ends with its result.
PART = """
import json, os, sys, time
import record
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
import gpu_parts, gpu_runner
parts = [gpu_parts.Part(name=n, question="?", words=("-c", {part!r}, n, code, wait), seconds=s, judges=("benchmarks/record.py",))
         for n, code, wait, s in [("one", "0", "0", 60), ("two", "0", "0", 60), ("three", "3", "0", 60), ("four", "0", "9", 1.5)]]
gpu_runner.Runner(Path(sys.argv[1]), environment={environment!r}, folder=Path(sys.argv[2]), card="C").run(parts)
"""
SMALL = ["machine", "passes", "engine", "drafts", "update", "peer", "fsdp2", "embedded"]
# Each group of scripts is imported by a fork, in which the packages that it does not name are gone.
WITHOUT = """
import json, os, runpy, sys
import torch, transformers
for lacking, scripts in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        for name in [each for each in sys.modules if each.partition(".")[0] in lacking]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(lacking))
        for script in scripts:
            runpy.run_path(script, run_name="imported")
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(str(scripts))
"""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def runner(modules: Callable[[str], Any], tmp_path: Path) -> Callable[..., Any]:
    def runner(card: str = "C", **variables: str) -> Any:
        environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS), **variables}
        given = {"environment": environment, "folder": tmp_path / "work", "card": card}
        return modules("gpu_runner").Runner(tmp_path / "lines.jsonl", **given)

    return runner


@pytest.fixture
def part(modules: Callable[[str], Any]) -> Callable[..., Any]:
    def part(name: str, *, code: int = 0, **more: Any) -> Any:
        words = ("-c", PART, name, str(code), "0")
        return modules("gpu_parts").Part(name=name, question="?", words=words, **{"seconds": 60, **more})

    return part


def driver(folder: Path, *, wait_s: str = "0", root: Path = ROOT) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(root / "benchmarks"), "WAIT_two": wait_s}
    words = [sys.executable, "-c", DRIVER.format(part=PART, environment=environment)]
    files = [str(folder / "lines.jsonl"), str(folder / "work")]
    return subprocess.Popen([*words, *files], env=environment, stdout=subprocess.DEVNULL)


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


# -- what is kept --------------------------------------------------------------------------------------------------------


def test_it_goes_on_after_a_kill_with_the_rows_that_are_left_and_in_another_checkout(tmp_path: Path) -> None:
    killed = driver(tmp_path, wait_s="60")
    deadline = time.monotonic() + 30
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
    assert driver(tmp_path, root=checkout(tmp_path / "other")).wait(60) == 0
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
    modules: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "judged" / "__pycache__").mkdir(parents=True)
    judged = tmp_path / "judged" / "code.py"
    judged.write_text("1")
    monkeypatch.setattr(modules("gpu_runner"), "ROOT", tmp_path)
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


def test_content_is_the_same_with_git_and_without(modules: Callable[[str], Any], tmp_path: Path) -> None:
    gpu_runner, gpu_parts = modules("gpu_runner"), modules("gpu_parts")
    other = checkout(tmp_path / "other")
    script = (
        "import gpu_parts, gpu_runner, json; print(json.dumps([gpu_runner.digest(each) for each in gpu_parts.parts()]))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=other / "benchmarks", capture_output=True, text=True)
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
    chosen = [part("first", seconds=1.5), part("second", only_after="first")]
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


# -- what is said --------------------------------------------------------------------------------------------------------


def test_a_bare_python_says_the_order_the_limits_and_what_is_missing(tmp_path: Path) -> None:
    words = [sys.executable, "-S", "-E", str(BENCHMARKS / "gpu.py"), "--lease", "15", "--work", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    first, *told, last = done.stdout.splitlines()
    assert first.endswith("what is left of 15 minutes:")
    assert [line.split()[1] for line in told[:4]] == ["machine", "draw", "passes", "tests"]
    assert "machine          30 s  what does the GPU itself do? (lacks a GPU, torch)" in told[0]
    assert ["left, unless" in line for line in told] == [False] * 10 + [True] * (len(told) - 10)
    assert "sglang" in told[6]
    assert last.startswith("None of them can run here")
    assert not list(tmp_path.rglob("*.jsonl"))


def test_parts_that_lack_something_are_left_out_and_the_others_run(
    modules: Callable[[str], Any],
    part: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = {"needs_gpu": False}
    known = [part("one", needs=("nowhere",), **here), part("two", compiles=True, **here), part("three")]
    monkeypatch.setattr(modules("gpu_parts"), "parts", lambda **_: known)
    gpu = modules("gpu")
    monkeypatch.setattr(gpu, "WARM_UP", ("-c", "pass"))
    monkeypatch.setattr(gpu, "card", lambda variables: None)
    given = ["--work", str(tmp_path / "work"), "--out", str(tmp_path), "--hardware", "h", "--wheels", str(tmp_path)]
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
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


def test_an_unknown_part_is_refused(modules: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        modules("gpu").main(["--only", "tabel"])
    assert "table-0.5B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
    ],
)
def test_a_file_is_named_by_the_card(modules: Callable[[str], Any], name: str, expected: str) -> None:
    assert modules("gpu_site").short(name) == expected


# -- the parts -----------------------------------------------------------------------------------------------------------


def test_parts_end_within_what_a_command_may_take_and_the_first_ten_within_a_quarter_of_an_hour(
    modules: Callable[[str], Any],
) -> None:
    parts = modules("gpu_parts").parts()
    assert all(part.seconds < 540 for part in parts)
    assert sum(part.seconds for part in parts[:10]) <= 900
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    for part in parts:
        if part.words[0].endswith(".py"):
            assert part.words[0] in part.judges
        assert all((ROOT / path).exists() for path in part.judges), part.judges
        assert part.only_after is None or names.index(part.only_after) < names.index(part.name)
    by_name = {part.name: part for part in parts}
    assert "tests/engine/test_device.py" in by_name["tests"].words
    assert "tests/sglang/test_gpu.py" in by_name["tests-sglang"].words
    assert [part.name for part in parts if part.small] == SMALL


def test_scripts_understand_what_they_are_told(modules: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes as far as where it notes the environment, which is behind its arguments."""

    class Understood(Exception):
        pass

    def environment() -> None:
        raise Understood

    monkeypatch.setattr(modules("record"), "environment", environment)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    parts = modules("gpu_parts").parts(server=["a=b"], variables=["C=d"])
    scripts = [(part.words[0], words) for part in parts for words in (part.words, part.small or part.words)]
    for script, words in scripts:
        if script.endswith(".py"):
            with pytest.raises(Understood):
                modules(Path(script).stem).main(list(words[1:]))
    costs = next(part for part in parts if part.name == "costs")
    config = compose("bench_costs", costs.words[costs.words.index("--json") + 1 :])
    assert (list(config.measure.nodes), config.measure.rounds, config.model.init.hidden_size) == ([15], 1, 896)
    assert (config.backend.arguments.a, config.backend.environment.C) == ("b", "d")


def test_servers_of_tables_capture_few_graphs_unless_somebody_has_chosen(modules: Callable[[str], Any]) -> None:
    def server(*given: str) -> list[str]:
        parts = {part.name: part for part in modules("gpu_parts").parts(server=given)}
        words = parts["table-7B"].words
        return list(modules("sglang_throughput").parse(words[1:]).server)

    assert server("a=b") == ["cuda_graph_bs_decode=[1,2,4,8,16,32,64,128]", "a=b"]
    assert server("cuda_graph_bs_decode=[1]") == ["cuda_graph_bs_decode=[1]"]


def test_tests_are_told_what_the_machine_needs(modules: Callable[[str], Any], tmp_path: Path) -> None:
    site = modules("gpu_site")
    given = {"server": ["attention_backend=triton", "x=true", "y=0.5"], "variables": ["A=b=1"]}
    found = site.environment(tmp_path, folder=tmp_path / "work", **given)
    assert json.loads(found["RHYMERL_SGLANG_GPU"]) == {
        "arguments": {"attention_backend": "triton", "x": True, "y": 0.5},
        "environment": {"A": "b=1"},
    }
    assert (found["PYTHONUNBUFFERED"], found["HF_HUB_OFFLINE"]) == ("1", "1")
    assert found["PYTHONPATH"].split(os.pathsep)[:2] == [str(tmp_path), str(ROOT)]
    assert found["NUMBA_CACHE_DIR"] == str(tmp_path / "work" / "numba")
    assert site.environment(tmp_path, folder=tmp_path, on_cpu=True)["CUDA_VISIBLE_DEVICES"] == ""


def test_parts_import_no_package_that_they_do_not_name(modules: Callable[[str], Any]) -> None:
    """transformers needs safetensors itself and may have jinja2."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {re.split("[<>=]", each)[0] for each in project["dependencies"]} - {"numpy", "hydra-core"}
    packages |= {"hydra", "antlr4", "sglang", "triton"}
    scripts: dict[tuple[str, ...], list[str]] = {}
    for part in modules("gpu_parts").parts():
        if part.words[0].endswith(".py") and not {"sglang", "hydra"} & set(part.needs):
            scripts.setdefault(part.needs, []).append(str(ROOT / part.words[0]))
    assert len(scripts) == 5
    beside = {needs: {"safetensors", "jinja2"} if "transformers" in needs else set() for needs in scripts}
    groups = [[sorted(packages - {*needs} - beside[needs]), paths] for needs, paths in scripts.items()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(ROOT)])}
    words = [sys.executable, "-c", WITHOUT, json.dumps(groups)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- on a CPU ------------------------------------------------------------------------------------------------------------

KEYS = {
    "machine": [["none"]],
    "passes": [["tiny", 1], ["tiny", 4], ["tiny", 8]],
    "engine": [["tiny", running, nodes] for nodes in (0, 2) for running in (1, 3)],
    "drafts": [["tiny", running, mode] for running in (1, 3) for mode in ("none", "history_tree")],
    "update": [["tiny", False], ["tiny", True]],
    "peer": [["tiny", 2]],
}


@pytest.mark.parametrize("name", list(KEYS))
def test_a_part_takes_the_rows_that_are_not_known(
    modules: Callable[[str], Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = next(part.small for part in modules("gpu_parts").parts() if part.name == name)
    script = modules(Path(small[0]).stem)
    noted, known = tmp_path / "rows", tmp_path / "known"
    monkeypatch.setenv("RHYMERL_BENCHMARK_ROWS", str(noted))
    taken = script.main(list(small[1:]))["rows"]
    assert [list(row.values())[: len(key)] for row, key in zip(taken, KEYS[name], strict=True)] == KEYS[name]
    assert [json.loads(line) for line in noted.read_text().splitlines()] == taken
    monkeypatch.setenv("RHYMERL_BENCHMARK_KNOWN", str(known))
    before = [{**row, "from": "before"} for row in taken[1:]]
    known.write_text("".join(json.dumps(row) + "\n" for row in before))
    noted.unlink()
    again = script.main(list(small[1:]))["rows"]
    assert again[1:] == before
    assert [json.loads(line) for line in noted.read_text().splitlines()] == again[:1]


def test_drafts_change_no_token_and_make_fewer_passes(modules: Callable[[str], Any]) -> None:
    words = ["--size", "tiny", "--tokens", "32", "--threads", "1", "--running", "4"]
    plain, drafted = modules("gpu_drafts").main(words)["rows"]
    assert plain["equal_answers"] == drafted["equal_answers"] == 1
    assert plain["accept_length"] == 1 < drafted["accept_length"]
    assert plain["accepted_from_history"] == 0 < drafted["accepted_from_history"]


def command(root: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    given = ["--on-cpu", "--out", str(folder), "--work", str(folder / "work"), "--wheels", str(folder / "wheels")]
    gpu = str(root / "benchmarks" / "gpu.py")
    return subprocess.run([sys.executable, gpu, *given, *words], capture_output=True, text=True)


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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_left_to_compile_when_a_compiler_has_been_beside(tmp_path: Path) -> None:
    """In bfloat16, in which passes on a CPU take the way of those on a GPU."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def compiled(name: str, *words: str) -> set[Path]:
        script = str(BENCHMARKS / f"{name}.py")
        subprocess.run([sys.executable, script, *words], env=environment, check=True, stdout=subprocess.DEVNULL)
        return set(tmp_path.rglob("*.nbc"))

    before = compiled("gpu_warm")
    assert len(before) > 10
    sizes = ("--size", "tiny", "--dtype", "bfloat16", "--tokens", "40", "--threads", "1")
    assert compiled("gpu_engine", *sizes, "--running", "1", "5", "--nodes", "0", "3", "16") == before
    assert compiled("gpu_drafts", *sizes, "--running", "1", "12") == before


# -- from rows to an emulated card ---------------------------------------------------------------------------------------


def measured(file: Path, *, card: str = "NVIDIA H100 80GB HBM3", milliseconds: dict[int, float]) -> Path:
    def spread(value: float) -> dict[str, float]:
        return {"median": value, "min": value, "max": value}

    passes = [
        {"size": "7B", "tokens": tokens, "pass_ms": spread(ms), "kv_bytes_per_token": 57_344}
        for tokens, ms in milliseconds.items()
    ]
    found = [{"part": "machine", "began": "", "card": card, "digest": "a"}]
    found += [{"part": "machine", "row": {"gpu": card, "copy_tb_s": spread(2.8672)}}]
    found += [{"part": "passes", "began": "", "card": card, "digest": "b"}]
    found += [{"part": "passes", "row": {**row, "size": size}} for row in passes for size in ("7B", "0.5B")]
    with file.open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in found)
    return file


def test_measured_passes_become_an_emulated_card(
    modules: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = measured(tmp_path / "gpu.jsonl", milliseconds={1: 6.1, 64: 6.0, 256: 8.5})
    assert modules("emulated_from").main([str(file), "--overhead-ms", "0.5"]) == 0
    (tmp_path / "mine.json").write_text(capsys.readouterr().out)
    found = json.loads((tmp_path / "mine.json").read_text())
    assert found["costs"] == [[1, 0.0066], [64, 0.0066], [256, 0.009]], "it never falls"
    assert found["context_s_per_token"] == 2e-8  # 57 344 bytes at 2.8672 TB/s
    assert "measured on NVIDIA H100" in found["source"]
    device = EmulatedDevice.read(tmp_path / "mine.json", scale=1.0)
    assert device.curve.seconds(160, 0, 0) == pytest.approx(0.0078)
    assert device.context_s_per_token == 2e-8


def test_the_newest_row_counts_and_cards_are_not_mixed(
    modules: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = measured(tmp_path / "gpu.jsonl", milliseconds={1: 6.0, 64: 7.0})
    measured(file, milliseconds={64: 8.0})
    emulated = modules("emulated_from").emulated
    assert emulated(file, "7B")["costs"] == [[1, 0.006], [64, 0.008]]
    measured(file, card="NVIDIA H200", milliseconds={1: 4.0, 64: 5.0})
    with pytest.raises(ValueError, match="expected passes of one card"):
        emulated(file, "7B")
    assert emulated(file, "7B", card="NVIDIA H200")["costs"] == [[1, 0.004], [64, 0.005]]
    assert modules("emulated_from").main([str(file), "--card", "NVIDIA H200", "--size", "1.5B"]) == 1
    assert "expected passes of 1.5B" in capsys.readouterr().err
