"""The wheel with its declared dependencies in an empty environment: documented commands and an example run.

It is outside the checkout. pip fetches the dependencies, all but torch, which is lent: a CUDA build takes gigabytes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks, write_files

pytestmark = pytest.mark.slow
LENT = ("torch", "functorch", "nvidia", "triton", "cuda")
PAGES = [
    ROOT / "docs" / "tutorial.md",
    *(each for each in sorted((ROOT / "docs").glob("own_*.md")) if each.stem != "own_data"),
]
FEW = [
    *("task.train_size=8", "task.validation_size=4", "data.prompts_per_step=4", "rollout.group_size=2"),
    *("rollout.max_tokens=16", "backend.max_running=8", "trainer.max_steps=2", "trainer.accelerator=cpu"),
]
OF_READERS = {"my_agent.yaml"}  # configs of pages, with a model and data that a reader has
SMALLER = {
    "fit": FEW,
    "warmstart": ["warmstart.num_steps=2"],
    "simulate": ["steps=4", "warm_up=1"],
}


class Installed:
    """An environment that has the wheel, and a reader's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "reader"
        self.folder.mkdir()
        (self.folder / "benchmarks").symlink_to(ROOT / "benchmarks")  # recorded rollouts
        wheel = build_wheel(folder / "dist")
        venv.create(folder / "env", with_pip=True)
        self.bin = folder / "env" / "bin"
        _lend_torch(folder / "env")
        pip = (self.bin / "python", "-m", "pip", "install", "--disable-pip-version-check", "--quiet")
        self.run(*pip, "--constraint", ROOT / "constraints.txt", f"{wheel}[plot]")  # pages draw charts

    def run(self, *words: str | Path) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run([*map(str, words)], cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def rhymerl(self, *words: str) -> str:
        return self.run(self.bin / "rhymerl", *words)


def _lend_torch(environment: Path) -> None:
    theirs = next(environment.glob("lib/python*/site-packages"))
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if each.name.startswith(LENT):
            (theirs / each.name).symlink_to(each)


def build_wheel(out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_what_is_imported_is_the_wheels(installed: Installed) -> None:
    file = Path(installed.run(installed.bin / "python", "-c", "import rhymerl; print(rhymerl.__file__)").strip())
    assert file.is_relative_to(installed.bin.parent)
    assert not file.is_symlink()


def test_the_quickstart_and_what_comes_after_it(installed: Installed) -> None:
    installed.rhymerl("fit", "--config", "quickstart", *FEW, "run_dir=runs/mine", "logger=[tensorboard,csv]")
    run = installed.folder / "runs" / "mine"
    left = ("report.html", "summary.json", "samples.jsonl", "tensorboard", "csv", "checkpoints/last.ckpt")
    assert [name for name in left if not (run / name).exists()] == []
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    installed.rhymerl("resume", "runs/mine", "trainer.max_steps=3")
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
    installed.rhymerl("evaluate", "runs/mine")
    assert "runs/again.html" in installed.rhymerl("report", "runs/mine", "out=runs/again.html")
    installed.rhymerl("fork", "runs/mine@0", "run_dir=runs/other", "update.learning_rate=1e-4")
    installed.rhymerl("export", "runs/mine", "runs/policy")
    assert (installed.folder / "runs" / "policy" / "README.md").is_file()
    installed.rhymerl(
        "fit", "--config", "quickstart", *FEW, "run_dir=runs/third", "model.path=runs/policy", "report=false"
    )


def test_the_example_drafter_by_dotted_path(installed: Installed) -> None:
    shutil.copy(ROOT / "examples" / "my_drafter.py", installed.folder)
    installed.rhymerl("fit", "--config", "quickstart", *FEW, "run_dir=runs/drafter", f"drafter={drafter_of_example()}")
    assert drafter_of_example() in (installed.folder / "runs" / "drafter" / "config.yaml").read_text()


def drafter_of_example() -> str:
    text = (ROOT / "examples" / "my_drafter.py").read_text()
    return f"my_drafter.{text.partition('class ')[2].partition('(')[0]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_the_documentation(page: Path, installed: Installed) -> None:
    write_files(page, installed.folder)
    for command in [words for block in blocks(page, "bash") for words in block.commands]:
        if OF_READERS & {*command}:
            continue
        if command[0] == "python":
            installed.run(installed.bin / "python", *command[1:])
        else:
            installed.rhymerl(*command[1:], *SMALLER.get(command[1], []))


def test_commands_that_tell(installed: Installed) -> None:
    configs = installed.rhymerl("configs")
    assert [path.stem for path in (ROOT / "configs").glob("*.yaml") if path.stem not in configs] == []
    assert "configs/base.yaml" in installed.rhymerl("explain", "run_ahead")
    assert "torch" in installed.rhymerl("doctor")
    assert "trainer" in installed.rhymerl("fit", "--config", "quickstart", "--print-config")
    assert "rhymerl" in installed.rhymerl("--version")
