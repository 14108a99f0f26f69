"""The data of a run that goes on: the same answers, and the date of its start."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from rhymerl.data import datamodule
from rhymerl.testing import tiny_policy
from tests.integration.conftest import Run, checkpoint, rows

TEMPLATE = "{{ strftime_now('%d%m%Y') }}+{{ messages[0]['content'] }}"


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A fit of two steps on a model whose template writes the date."""
    monkeypatch.chdir(tmp_path)
    policy = tiny_policy(dtype="float32", context=128)
    policy.tokenizer.chat_template = TEMPLATE
    policy.save(tmp_path / "model")
    write_rows(["0", "2", "4"])
    return [
        *("--config=grpo_jsonl", "data.train=prompts.jsonl", "data.validation=prompts.jsonl", "model.path=model"),
        *("data.prompts_per_step=3", "rollout.group_size=2", "rollout.max_tokens=4", "checkpoint.every_n_steps=1"),
        *("run_dir=run", "trainer.max_steps=2", "report=false", "logger=null"),
    ]


def write_rows(answers: list[str]) -> None:
    lines = [
        {"id": number, "prompt": [{"role": "user", "content": f"{number}+{number}"}], "answer": answer}
        for number, answer in enumerate(answers)
    ]
    Path("prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_other_answers_under_the_same_ids_are_refused(words: list[str], rhymerl: Run) -> None:
    assert rhymerl("fit", *words).code == 0
    write_rows(["0", "2", "5"])
    done = rhymerl("resume", "run", "trainer.max_steps=3")
    assert done.code == 2
    assert "error: data.train: columns beside the prompt, such as the answers, have changed since" in done.err
    write_rows(["0", "2", "4"])
    assert rhymerl("resume", "run", "trainer.max_steps=3").code == 0


def test_a_run_goes_on_with_the_date_of_its_start(
    words: list[str], rhymerl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Tomorrow:
            return cls(2020, 2, 3)

    assert rhymerl("fit", *words).code == 0
    monkeypatch.setattr(datamodule, "datetime", Tomorrow)
    done = rhymerl("resume", "run", "trainer.max_steps=3")
    assert done.code == 0, done.err
    assert checkpoint(Path("run"))["PromptDataModule"]["started"][:4] != "2020"
    assert rhymerl("evaluate", "run").code == 0
    assert not any("03022020" in row["prompt"] for row in rows(Path("run/evaluations/step=3.jsonl")))
    assert rhymerl("evaluate", *words, "run_dir=other").code == 0
    assert all("03022020" in row["prompt"] for row in rows(Path("other/evaluations/step=0.jsonl")))
