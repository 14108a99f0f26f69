from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from rhymerl.cli import main
from rhymerl.runs import doctor
from tests.models.small import LATENT, small_model
from tests.models.wrapped import save_wrapped


def test_the_command_says_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["versions"]["rhymerl"] == metadata.version("rhymerl")
    extras = {each["name"]: each["missing"] for each in found["extras"]}
    assert set(extras) == set(metadata.metadata("rhymerl").get_all("Provides-Extra") or [])
    assert extras["plot"] == []
    assert len(found["devices"]) == torch.cuda.device_count()
    assert found["uses"]["device"].startswith("cuda" if found["devices"] else "cpu")
    assert 0 < found["free_memory_bytes"] <= found["memory_bytes"]
    assert "not there" in captured.err  # people's lines


@pytest.mark.parametrize(
    ("num_devices", "has_sglang", "taken", "why"),
    [
        (0, True, "embedded", "for GPUs"),
        (1, False, "embedded", "not installed"),
        (1, True, "backend=sglang", "no second copy of the weights"),
    ],
)
def test_which_engine_to_take_and_why(num_devices: int, has_sglang: bool, taken: str, why: str) -> None:
    words = doctor._engine(num_devices, has_sglang)
    assert words.startswith(taken)
    assert why in words


def test_lines_fit_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("versions")
    assert all(len(line) <= 80 for line in lines)


def test_a_requirement_that_is_not_met_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy>=1000", "nothing-of-this-name>=1; extra == 'gguf'"])
    machine = doctor.examine()
    assert any(f"numpy>=1000 ({metadata.version('numpy')})" in problem for problem in machine.problems)
    missing = {each.name: each.missing for each in machine.extras}
    assert missing["gguf"] == ["nothing-of-this-name>=1 (not installed)"]


def test_little_room_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**29))
    machine = doctor.examine(tmp_path / "runs" / "new")
    problems = [*machine.problems]
    assert any("0.5 GiB free" in each and "set run_dir elsewhere" in each for each in problems)
    assert any("/dev/shm" in each for each in problems) == Path("/dev/shm").is_dir()


@pytest.mark.parametrize(("limit", "used", "expected"), [("1000", "600", (1000, 400)), ("max", "600", None)])
def test_a_containers_limit_is_its_memory(
    limit: str, used: str, expected: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    monkeypatch.setattr(doctor, "_CGROUP", tmp_path)
    total, free = doctor._memory()
    assert (total, free) == expected if expected else total > free > 2**20


def test_the_packages_requirements_are_read_from_its_metadata() -> None:
    always = {Requirement(each).name for each in metadata.requires("rhymerl") or () if "extra" not in each}
    assert {name for name, _ in doctor._requirements(None)} == always


def test_what_a_model_would_do_is_said_before_its_weights_are_loaded(tmp_path: Path, capsys) -> None:
    save_wrapped("qwen3_5", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert main(["doctor", f"model.path={tmp_path}", "--json"]) == 0
    captured = capsys.readouterr()
    model = json.loads(captured.out)["model"]
    assert model["name"] == "Qwen3_5ForConditionalGeneration"
    assert 0 < model["num_trained"] < model["num_parameters"]
    assert model["layers"] == {"linear_attention": 1, "full_attention": 1}
    assert model["engine_refuses"] is None
    assert model["shares_no_prompts"] is None
    assert "once for all of its answers" in captured.err


def test_a_model_whose_prompts_are_not_shared(tmp_path: Path, capsys) -> None:
    small_model("deepseek_v32", **LATENT).config.save_pretrained(tmp_path)
    assert main(["doctor", f"model.path={tmp_path}", "--json"]) == 0
    captured = capsys.readouterr()
    assert "indexed_attention" in json.loads(captured.out)["model"]["shares_no_prompts"]
    assert "for each of its answers" in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model.path=/no/such", "model.path='/no/such': no such directory"),
        ("data.x=1", "rhymerl doctor takes settings of a model alone (model.path=PATH), not 'data.x=1'"),
        ("model={_target_: rhymerl.testing.tiny_policy}", "takes settings of a model alone"),
    ],
)
def test_settings_that_are_no_models(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", words]) == 2
    assert message in capsys.readouterr().err
