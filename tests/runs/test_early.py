"""What is wrong with paths, columns and extras is said before torch is imported; nothing else is refused there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rhymerl.cli.kinds import names_of
from rhymerl.config.composition import written
from rhymerl.errors import ConfigError, RhymeError
from rhymerl.runs.early import check_early

ROW = {"prompt": "1+1=?", "answer": "2"}
PROGRAM = """
import sys
from rhymerl.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "transformers", "lightning"} & set(sys.modules)
sys.exit(code if not heavy else f"{heavy} had been imported")
"""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(ROW) + "\n")
    Path("odd.jsonl").write_text(f"{json.dumps(ROW)}\n" * 3 + '{"question": "1+1=?"}\n')
    Path("gap.jsonl").write_text(f'{json.dumps(ROW)}\n{{"prompt": "2"}}\n')
    return tmp_path


def check(*words: str) -> None:
    check_early(written("grpo_jsonl", ["model.path=owner/name", "data.train=rows.jsonl", *words]))


def missing(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is not None, reason=f"{name} is installed")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.train=none.jsonl"], "data.train='none.jsonl': no such file; expected a .jsonl"),
        (["data.train=[rows.jsonl,none.jsonl]"], "data.train[1]='none.jsonl': no such file"),
        (["data.validation={hard:none.csv}"], "data.validation.hard='none.csv': no such file"),
        (["data.train=odd.jsonl"], "data.train='odd.jsonl', line 4: data.prompt_column='prompt': no such column; it has "),
        (["data.prompt_column=question"], "line 1: data.prompt_column='question': no such column; it has 'prompt', 'answer'"),
        (["data.train=gap.jsonl"], "line 2: no column 'answer', as other rows have it; rewards.exact_match"),
        (["rewards.exact_match=rhymerl.rewards.code"], "it needs a column 'tests', and the data set has answer"),
        (["rewards.exact_match=nowhere.score"], "no module named 'nowhere'"),
        (["model.path=/no/model"], "model.path='/no/model': no such directory"),
        (["model.path=."], "model.path='.': not a model directory (it has no config.json)"),
        (["model.path=./some.gguf"], "model.path='./some.gguf': no such file"),
        (["model.path=???"], "model.path: required, but not set"),
        pytest.param(["data.train=owner/name"], "reading it needs datasets: pip install 'rhymerl[data]'", marks=missing("datasets")),
        pytest.param(["backend=sglang"], "backend=sglang needs sglang: pip install 'rhymerl[sglang]'", marks=missing("sglang")),
        pytest.param(["logger=wandb"], "needs wandb: pip install 'rhymerl[wandb]'", marks=missing("wandb")),
        pytest.param(["task=reasoning_gym"], "task=reasoning_gym needs reasoning-gym: pip install 'rhymerl[reasoning]'", marks=missing("reasoning_gym")),
        pytest.param(["environment=verifiers"], "environment=verifiers needs verifiers: pip install 'rhymerl[verifiers]'", marks=missing("verifiers")),
    ],
)  # fmt: skip
def test_says_what_is_wrong(words: Sequence[str], message: str, rows: Path) -> None:
    with pytest.raises(RhymeError) as caught:
        check(*words)
    assert message in str(caught.value)


def test_before_torch_and_as_the_only_line(rows: Path) -> None:
    words = ["fit", "--config", "grpo_jsonl", "model.path=owner/name", "data.train=odd.jsonl", "run_dir=run"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: data.train='odd.jsonl', line 4: data.prompt_column='prompt': no such column")
    assert done.stderr.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["data.train=${oc.env:HOME}"],  # a link to what the run looks up
        ["data.validation=odd.jsonl", "data.validation_prompts=3"],  # the fourth row is never read
        ["data.train=gap.jsonl", "data.filter_overlong_prompts=true"],  # the second may be left out
        ["data.train=null", "task=addition"],
        ["backend=sglang", "backend.url=http://127.0.0.1:1"],
        ["update.betas.0=0.8", "trainer.logger=my_module.Mine", "trainer.logger.name=mine"],
    ],
)
def test_leaves_the_rest_to_the_run(words: Sequence[str], rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "${data.somewhere}")
    check(*words)


@pytest.mark.parametrize("name", names_of("fit"))
def test_packaged_configs_lack_nothing_but_what_users_give(name: str) -> None:
    said = ""
    try:
        check_early(written(name, []))
    except ConfigError as error:
        said = str(error)
    assert not said or "required, but not set" in said or "pip install 'rhymerl[" in said
