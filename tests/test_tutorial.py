"""The tutorial and the how-to about one's own data run from first to last block, made small by overrides."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
from pathlib import Path

import pytest

from rhymerl.cli import main
from tests.documents import ROOT, blocks, reader_in, write_files

DOCS = ROOT / "docs"
POLICY = ROOT / "rhymerl" / "assets" / "quickstart_policy"
SMALLER = {
    "warmstart": ["warmstart.num_steps=2"],
    "fit": ["trainer.max_steps=2", "data.prompts_per_step=4", "rollout.max_tokens=8", "trainer.accelerator=cpu"],
}


def run(page: Path, smaller: dict[str, list[str]]) -> list[str]:
    """Run each command of a page in the current folder; returns what each printed."""
    printed = []
    for block in blocks(page, "bash"):
        for words in block.commands:
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                if words[0] == "python":
                    runpy.run_path(words[1], run_name="__main__")
                else:
                    assert words[0] == "rhymerl"
                    assert main([*words[1:], *smaller.get(words[1], [])]) == 0, words
            printed.append(output.getvalue())
    return printed


@pytest.mark.filterwarnings("ignore::UserWarning")  # matplotlib's, of a reward curve of two points
def test_the_tutorial(tmp_path: Path) -> None:
    page = DOCS / "tutorial.md"
    write_files(page, tmp_path)
    smaller = SMALLER | {"fit": [*SMALLER["fit"], "task.train_size=8", "task.validation_size=4"]}
    with reader_in(tmp_path):
        printed = run(page, smaller)
    assert {"report.html", "rollouts.jsonl.gz"} <= {path.name for path in (tmp_path / "runs" / "backwards").iterdir()}
    assert set(printed[-1].strip()) <= set("0123456789#")


def test_the_reward_of_the_tutorial(tmp_path: Path) -> None:
    write_files(DOCS / "tutorial.md", tmp_path)
    with reader_in(tmp_path):
        share_right = runpy.run_path("backwards.py")["share_right"]
    assert share_right("1174", answer="1174") == 1
    assert share_right("1175", answer="1174") == 0.75
    assert share_right("11745", answer="1174") == 0.8
    assert share_right("", answer="1174") == 0


def test_ones_own_data(tmp_path: Path) -> None:
    page = DOCS / "own_data.md"
    write_files(page, tmp_path)
    rows = "".join(json.dumps({"prompt": f"{number}+1=?\n", "answer": str(number + 1)}) + "\n" for number in range(8))
    (tmp_path / "train.jsonl").write_text(rows)
    (tmp_path / "held_out.jsonl").write_text(rows)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "model").symlink_to(POLICY)
    smaller = SMALLER | {"fit": [*SMALLER["fit"], "evaluation.every_n_steps=1"]}
    smaller["evaluate"] = ["rollout.max_tokens=8", "trainer.accelerator=cpu"]
    with reader_in(tmp_path):
        run(page, smaller)
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert list((tmp_path / "runs" / "before" / "evaluations").iterdir())
