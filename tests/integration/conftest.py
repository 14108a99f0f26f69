from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rhymerl.cli import main
from rhymerl.testing import tiny_policy

Run = Callable[..., "Done"]


class Done:
    """The traces of a command: exit code, words, and the run directory if there is one."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Bits follow the number of threads; and the modules of one test's folder are unknown to the next."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    torch.set_num_threads(threads)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model over the characters of the running sums."""
    path = tmp_path_factory.mktemp("model")
    tiny_policy(dtype="float32", context=128, peaked=2.0).save(path)
    return path


@pytest.fixture
def rhymerl(capfd: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process."""

    def run(*words: str) -> Done:
        capfd.readouterr()
        code = main(list(words))
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def whole_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a module's whole run is, once it is made."""
    return tmp_path_factory.mktemp("whole") / "run"


def made_once(run_dir: Path, words: Sequence[str], rhymerl: Run) -> Path:
    """The run directory of a run by these words, which is made where there is none yet."""
    if not run_dir.exists():
        done = rhymerl(*words)
        assert done.code == 0, done.err
    return run_dir


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six prompts, two of them for validation by name; Lightning's own directories end up beside them."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}=?\n", "answer": str(2 * i)}) + "\n" for i in range(6)))
    return path


CHEAP_DRAFTS = "budget.ask_cost=[0.1, 0.01]"  # so that drafts are made in small batches, too


@pytest.fixture
def settings(model_dir: Path) -> list[str]:
    """`fit` on 10 prompts, 4 a step: three steps a pass, two optimizer steps each, six steps in all."""
    return [
        "fit",
        "--config=quickstart",
        f"model.path={model_dir}",
        "task.difficulty=3",
        "task.train_size=10",
        "task.validation_size=4",
        "data.prompts_per_step=4",
        "rollout.group_size=4",
        "rollout.max_tokens=16",
        "update.mini_batches=2",
        "update.lr_schedule=linear",
        "update.learning_rate=1e-2",
        "rewards={digits: tests.integration.rewards.digits}",
        "backend.max_running=8",
        CHEAP_DRAFTS,
        "checkpoint.every_n_steps=1",
        "trainer.max_steps=12",
    ]


def checkpoint(run_dir: Path, name: str = "last") -> dict[str, Any]:
    return torch.load(run_dir / "checkpoints" / f"{name}.ckpt", weights_only=True)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_same(one: Any, two: Any, location: str = "") -> None:
    """Equal to the last bit, tensors within containers too."""
    assert type(one) is type(two), location
    if isinstance(one, dict):
        assert list(one) == list(two), location
        for name in one:
            if name == "RecordSteps":  # how many bytes its file has, which depends on the times in it
                continue
            assert_same(one[name], two[name], f"{location}.{name}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), location
        for index, (left, right) in enumerate(zip(one, two, strict=True)):
            assert_same(left, right, f"{location}[{index}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two), location
    else:
        assert one == two, location
