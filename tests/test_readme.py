"""Every block of the README, and of the page about Python, runs as it stands, made small by further overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rhymerl.cli import main
from rhymerl.config import compose
from tests.documents import README, ROOT, blocks, reader_in, write_files

TINY = ["rollout.group_size=2", "rollout.max_tokens=16", "backend.max_running=8", "trainer.accelerator=cpu"]
TINY_TASK = ["task.train_size=8", "task.validation_size=4", "data.prompts_per_step=4"]
PYTHON = ROOT / "docs" / "python.md"
MAX_WORDS = 1000
SMALLER = {
    "max_steps=100": "max_steps=1, accelerator='cpu', logger=False, enable_checkpointing=False",
    "difficulty=3": "difficulty=3, train_size=4, validation_size=2",
    "max_tokens=64": "max_tokens=8",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The reader's: the README's own files, some data, and a model where the pages have one."""
    folder = tmp_path_factory.mktemp("reader")
    write_files(README, folder)
    rows = [{"prompt": f"{number}+1=?\n", "answer": str(number + 1)} for number in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "model").symlink_to(ROOT / "rhymerl" / "assets" / "quickstart_policy")
    with reader_in(folder):
        yield folder


def test_make_has_the_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", README.read_text()))
    assert {"quickstart", "docs"} <= named <= targets


def test_it_is_read_in_minutes() -> None:
    assert len(README.read_text().split()) <= MAX_WORDS


@pytest.mark.parametrize("block", blocks(README, "bash"), ids=str)
def test_commands(block, folder: Path) -> None:
    for words in block.commands:
        if words[0] == "make":
            continue  # see above; the quickstart itself is composed below
        assert words.pop(0) == "rhymerl"
        if words[0] == "fit":
            words += [*TINY, *(TINY_TASK if "quickstart" in words else []), "trainer.max_steps=1"]
        assert main(words) == 0, words


def test_what_the_commands_leave(folder: Path) -> None:
    """The commands run in one go, so that it holds when the tests above run elsewhere."""
    data = ["data.train=train.jsonl", "model.path=path/to/model", "run_dir=runs/again", "trainer.max_steps=1"]
    assert main(["fit", "--config", "grpo_jsonl", *data, *TINY]) == 0
    assert main(["export", "runs/again", "exported_again"]) == 0
    assert {"config.json", "model.safetensors"} <= {path.name for path in (folder / "exported_again").iterdir()}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("block", [*blocks(README, "python"), *blocks(PYTHON, "python")], ids=str)
def test_python(block, folder: Path) -> None:
    text = block.text
    if block.file is None:
        for long, short in SMALLER.items():
            assert long in text
            text = text.replace(long, short)
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(text, str(block), "exec"), names)
    if block.file is None:
        assert names["module"].num_rollouts == 1  # type: ignore[attr-defined]


def test_the_drafter_is_that_of_the_examples() -> None:
    (drafter,) = (block.text for block in blocks(README, "python") if block.file == "my_drafter.py")
    example = (ROOT / "examples" / "my_drafter.py").read_text()
    code = [line for line in drafter.splitlines()[1:] if line.strip()]
    assert [line for line in code if line not in example.splitlines()] == []


def test_what_the_quickstart_is_said_to_be() -> None:
    assert compose("quickstart").trainer.max_steps == 48
    assert "within 48 steps" in README.read_text()
