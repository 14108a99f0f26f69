"""`rhymerl fit --dry-run`: all checks and an estimate, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rhymerl.training import memory
from tests.integration.conftest import Run
from tests.models.ggufs import write_gguf


def test_it_checks_and_estimates_and_writes_nothing(rhymerl: Run, settings: list[str], tmp_path: Path):
    run_dir = tmp_path / "run"
    done = rhymerl(*settings, f"run_dir={run_dir}", "--dry-run")
    assert done.code == 0, done.err
    assert "moments" in done.out
    assert "this was a dry run" in done.out
    assert not run_dir.exists()
    found = json.loads(rhymerl(*settings, f"run_dir={run_dir}", "--dry-run", "--json").out)
    assert found["bytes_per_rank"]["moments"] == 2 * found["bytes_per_rank"]["gradients"] > 0
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rollout.max_tokens=4096", "set rollout.max_tokens to at most 120"),
        ("backend.kv_tokens=3", "backend.kv_tokens=3: the longest prompt and its answer need"),
    ],
)
def test_what_is_wrong_is_wrong_in_a_dry_run(word, message, rhymerl: Run, settings: list[str], tmp_path: Path):
    done = rhymerl(*settings, f"run_dir={tmp_path / 'run'}", word, "--dry-run")
    assert done.code == 2
    assert message in done.err


def test_a_run_that_is_there_stays_as_it_is(rhymerl: Run, settings: list[str], tmp_path: Path):
    run_dir = tmp_path / "run"
    words = [*settings, f"run_dir={run_dir}"]
    assert rhymerl(*words, "trainer.max_steps=2", "checkpoint.every_n_steps=1").code == 0
    before = {path: path.stat().st_mtime_ns for path in sorted(run_dir.rglob("*"))}
    refused = rhymerl(*words, "--dry-run")
    assert refused.code == 2, "another run would be refused too"
    assert "holds another run" in refused.err
    done = rhymerl("resume", str(run_dir), "trainer.max_steps=4", "--dry-run")
    assert done.code == 0, done.err
    assert "Going on from" in done.out
    assert {path: path.stat().st_mtime_ns for path in sorted(run_dir.rglob("*"))} == before


def test_a_gguf_file_is_estimated_too(rhymerl: Run, settings: list[str], tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf")
    path = f"model.path={tmp_path / 'tiny.gguf'}"
    words = [path if word.startswith("model.path=") else word for word in settings]
    done = rhymerl(*words, f"run_dir={tmp_path / 'run'}", "--dry-run")
    assert done.code == 0, done.err


class Small:
    """A GPU of so many bytes, as far as the check before a run looks at it."""

    def __init__(self, total_memory: int) -> None:
        self.total_memory = total_memory


@pytest.mark.parametrize(("total", "code"), [(1000, 2), (2**30, 0)], ids=["certain", "estimated"])
def test_a_gpu_that_is_too_small_for_certain_is_refused(
    total, code, monkeypatch, rhymerl: Run, settings: list[str], tmp_path: Path
):
    monkeypatch.setattr(memory, "_gpu_of", lambda trainer: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Small(total))
    done = rhymerl(*settings, f"run_dir={tmp_path / 'run'}", "trainer.max_steps=2")
    assert done.code == code, done.err
    if code:
        assert "model: weights, gradients and moments of a rank take 0.0 GiB" in done.err
        assert not (tmp_path / "run").exists()
    else:
        assert "memory   may be " in done.out
