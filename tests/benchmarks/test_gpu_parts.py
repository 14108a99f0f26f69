"""The parts of `make gpu`: what they need, what they are told, and their rows, as small as on a CPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.gpu import drafts, sglang_throughput, site
from benchmarks.gpu import parts as gpu_parts
from rhymerl.config import compose

ROOT = Path(__file__).parents[2]
# Each group of scripts is imported by a fork, in which the packages that it does not name are gone.
WITHOUT = """
import importlib, json, os, sys
import torch, transformers
for lacking, scripts in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        for name in [each for each in sys.modules if each.partition(".")[0] in lacking]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(lacking))
        for script in scripts:
            importlib.import_module(script)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(str(scripts))
"""


def script_of(part: gpu_parts.Part) -> str | None:
    """Return the module of a part that is one of the benchmarks."""
    return part.words[1] if part.words[1].startswith("benchmarks.") else None


# -- the parts
# -----------------------------------------------------------------------------------------------------------


def test_parts_end_within_what_a_command_may_take_and_the_first_ten_within_a_quarter_of_an_hour() -> None:
    parts = gpu_parts.parts()
    assert all(part.seconds < 540 for part in parts)
    assert sum(part.seconds for part in parts[:10]) <= 900
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    for part in parts:
        if script := script_of(part):
            assert f"{script.replace('.', '/')}.py" in part.judges
        assert all((ROOT / path).exists() for path in part.judges), part.judges
        assert part.only_after is None or names.index(part.only_after) < names.index(part.name)
    by_name = {part.name: part for part in parts}
    assert "tests/engine/test_device.py" in by_name["tests"].words
    assert "tests/sglang/test_gpu.py" in by_name["tests-sglang"].words
    on_cpu = {part.name for part in parts if part.small}
    assert on_cpu == {*KEYS, "fsdp2", "embedded"}


def test_scripts_understand_what_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes as far as where it notes the environment, which is behind its arguments."""

    class Understood(Exception):
        pass

    def environment() -> None:
        raise Understood

    monkeypatch.setattr(record, "environment", environment)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    parts = gpu_parts.parts(server=["a=b"], variables=["C=d"])
    scripts = [(script_of(part), words) for part in parts for words in (part.words, part.small or part.words)]
    for script, words in scripts:
        if script:
            with pytest.raises(Understood):
                importlib.import_module(script).main(list(words[2:]))
    costs = next(part for part in parts if part.name == "costs")
    config = compose("bench_costs", costs.words[costs.words.index("--json") + 1 :])
    assert (list(config.measure.nodes), config.measure.rounds, config.model.init.hidden_size) == ([15], 1, 896)
    assert (config.backend.arguments.a, config.backend.environment.C) == ("b", "d")


def test_servers_of_tables_capture_few_graphs_unless_somebody_has_chosen() -> None:
    def server(*given: str) -> list[str]:
        parts = {part.name: part for part in gpu_parts.parts(server=given)}
        words = parts["table-7B"].words
        return list(sglang_throughput.parser_of().parse_args(words[2:]).server)

    assert server("a=b") == ["cuda_graph_bs_decode=[1,2,4,8,16,32,64,128]", "a=b"]
    assert server("cuda_graph_bs_decode=[1]") == ["cuda_graph_bs_decode=[1]"]


def test_tests_are_told_what_the_machine_needs(tmp_path: Path) -> None:
    given = {"server": ["attention_backend=triton", "x=true", "y=0.5"], "variables": ["A=b=1"]}
    found = site.environment(tmp_path, folder=tmp_path / "work", **given)
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]  # as all servers here
    assert json.loads(found["RHYMERL_SGLANG_GPU"]) == {
        "arguments": {"cuda_graph_bs_decode": sizes, "attention_backend": "triton", "x": True, "y": 0.5},
        "environment": {"A": "b=1"},
    }
    assert (found["PYTHONUNBUFFERED"], found["HF_HUB_OFFLINE"]) == ("1", "1")
    assert found["PYTHONPATH"].split(os.pathsep)[:2] == [str(tmp_path), str(ROOT)]
    assert found["NUMBA_CACHE_DIR"] == str(tmp_path / "work" / "numba")
    assert site.environment(tmp_path, folder=tmp_path, on_cpu=True)["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_parts_import_no_package_that_they_do_not_name() -> None:
    """transformers needs safetensors itself and may have jinja2."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {re.split("[<>=]", each)[0] for each in project["dependencies"]} - {"numpy", "hydra-core"}
    packages |= {"hydra", "antlr4", "sglang", "triton"}
    scripts: dict[tuple[str, ...], list[str]] = {}
    for part in gpu_parts.parts():
        if (script := script_of(part)) and not {"sglang", "hydra"} & set(part.needs):
            scripts.setdefault(part.needs, []).append(script)
    assert len(scripts) == 5
    beside = {needs: {"safetensors", "jinja2"} if "transformers" in needs else set() for needs in scripts}
    groups = [[sorted(packages - {*needs} - beside[needs]), paths] for needs, paths in scripts.items()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", WITHOUT, json.dumps(groups)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- on a CPU
# ------------------------------------------------------------------------------------------------------------

KEYS = {
    "machine": [["none"]],
    "passes": [["tiny", 1], ["tiny", 4], ["tiny", 8]],
    "engine": [["tiny", nodes, running] for nodes in (0, 2) for running in (1, 3)],
    "drafts": [["tiny", running, mode] for running in (1, 3) for mode in ("none", "history_tree")],
    "update": [["tiny", False], ["tiny", True]],
    "peer": [["tiny", 2]],
}


@pytest.mark.parametrize("name", list(KEYS))
def test_a_part_takes_the_rows_that_are_not_known(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = next(part.small for part in gpu_parts.parts() if part.name == name)
    script = importlib.import_module(small[1])
    noted, known = tmp_path / "rows", tmp_path / "known"
    monkeypatch.setenv("RHYMERL_BENCHMARK_ROWS", str(noted))
    taken = script.main(list(small[2:]))["rows"]
    assert [list(row.values())[: len(key)] for row, key in zip(taken, KEYS[name], strict=True)] == KEYS[name]
    assert [json.loads(line) for line in noted.read_text().splitlines()] == taken
    monkeypatch.setenv("RHYMERL_BENCHMARK_KNOWN", str(known))
    before = [{**row, "from": "before"} for row in taken[1:]]
    known.write_text("".join(json.dumps(row) + "\n" for row in before))
    noted.unlink()
    again = script.main(list(small[2:]))["rows"]
    assert again[1:] == before
    assert [json.loads(line) for line in noted.read_text().splitlines()] == again[:1]


def test_drafts_change_no_token_and_make_fewer_passes() -> None:
    words = ["--size", "tiny", "--tokens", "32", "--threads", "1", "--running", "4"]
    plain, drafted = drafts.main(words)["rows"]
    assert plain["equal_answers"] == drafted["equal_answers"] == 1
    assert plain["accept_length"] == 1 < drafted["accept_length"]
    assert plain["accepted_from_history"] == 0 < drafted["accepted_from_history"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_left_to_compile_when_a_compiler_has_been_beside(tmp_path: Path) -> None:
    """In bfloat16, in which passes on a CPU take the way of those on a GPU."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def compiled(name: str, *words: str) -> set[Path]:
        command = [sys.executable, "-m", f"benchmarks.gpu.{name}", *words]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        return set(tmp_path.rglob("*.nbc"))

    before = compiled("warm")
    assert len(before) > 10
    sizes = ("--size", "tiny", "--dtype", "bfloat16", "--tokens", "40", "--threads", "1")
    assert compiled("engine", *sizes, "--running", "1", "5", "--nodes", "0", "3", "16") == before
    assert compiled("drafts", *sizes, "--running", "1", "12") == before
