"""Runs whose policy, or teacher, is a GGUF file: bad files at the command line, training, resume, export."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rhymerl.models.policy import PolicySource
from tests.integration.conftest import Run, assert_same, checkpoint
from tests.integration.test_distill import kl_of
from tests.models.ggufs import TEMPLATE, write_gguf


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def words(settings: list[str], gguf_file: Path) -> list[str]:
    """Those of `settings` with the model from the file, and with a chat prompt where it has a template for it."""
    return [f"model.path={gguf_file}" if word.startswith("model.path=") else word for word in settings]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "run"


@pytest.fixture
def whole(run_dir: Path, words: list[str], rhymerl: Run) -> Path:
    """A finished run; made once."""
    if not run_dir.exists():
        done = rhymerl(*words, "trainer.max_steps=8", "checkpoint.keep=9", f"run_dir={run_dir}")
        assert done.code == 0, done.err
    return run_dir


def test_a_resumed_run_ends_in_the_same_weights(whole: Path, words: list[str], tmp_path: Path, rhymerl: Run) -> None:
    earlier = whole / "checkpoints" / "step=2.ckpt"
    done = rhymerl(*words, "trainer.max_steps=8", f"ckpt_path={earlier}", f"run_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    assert_same(checkpoint(tmp_path / "run")["state_dict"], checkpoint(whole)["state_dict"])


def test_another_file_of_the_same_weights_goes_on_and_one_of_others_does_not(
    whole: Path, words: list[str], gguf_file: Path, tmp_path: Path, rhymerl: Run
) -> None:
    (tmp_path / "moved.gguf").write_bytes(gguf_file.read_bytes())
    write_gguf(tmp_path / "other.gguf", quantised=None)
    last = f"ckpt_path={whole / 'checkpoints' / 'step=4.ckpt'}"
    more = ["trainer.max_steps=10", last, f"run_dir={tmp_path / 'run'}"]
    other = rhymerl(*words, f"model.path={tmp_path / 'other.gguf'}", *more)
    assert other.code == 2
    assert "its run started from other weights than those of model.path" in other.err.splitlines()[-1]
    assert rhymerl(*words, f"model.path={tmp_path / 'moved.gguf'}", *more).code == 0


def test_export_writes_what_plain_transformers_loads(whole: Path, tmp_path: Path, rhymerl: Run) -> None:
    assert rhymerl("export", str(whole), str(tmp_path / "out")).code == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    weights = {name.removeprefix("model."): each for name, each in checkpoint(whole)["state_dict"].items()}
    assert_same(dict(model.state_dict()), weights)
    assert tokenizer.chat_template == TEMPLATE
    assert model.config.tie_word_embeddings
    assert not hasattr(model.config, "quantization_config")
    assert model.generation_config.eos_token_id == 1
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1"}], add_generation_prompt=True, return_tensors="pt"
    )
    assert torch.isfinite(model(**asked).logits).all()


@pytest.mark.parametrize("over", [pytest.param("sampled", marks=pytest.mark.slow), "vocabulary"])
def test_a_teacher_in_a_file_teaches_what_its_directory_does(over, words: list[str], tmp_path: Path, rhymerl: Run):
    file, folder = tmp_path / "teacher.gguf", tmp_path / "teacher"
    write_gguf(file, weights=lambda weights: {name: 1.3 * array for name, array in weights.items()})
    PolicySource(str(file)).load().save(folder)
    settings = [*words, "algo=distill", f"algo.over={over}", "trainer.max_steps=4", "logger=csv"]
    for path in (file, folder):
        done = rhymerl(*settings, f"teacher.path={path}", f"run_dir={tmp_path / f'by_{path.name}'}")
        assert done.code == 0, done.err
    by_file, by_folder = tmp_path / "by_teacher.gguf", tmp_path / "by_teacher"
    assert_same(checkpoint(by_file)["state_dict"], checkpoint(by_folder)["state_dict"])
    assert kl_of(by_file) == kl_of(by_folder)
    assert kl_of(by_file)[0] > 0.01
    assert rhymerl("plan", *settings[1:], f"teacher.path={file}").code == 0


def test_a_teacher_in_a_file_that_cannot_judge_is_one_line(
    settings: list[str], gguf_file: Path, tmp_path: Path, rhymerl: Run
) -> None:
    (tmp_path / "bad.gguf").write_text("<!DOCTYPE html>")
    for path, message in ((gguf_file, "it has another tokenizer than the policy ("), ("bad.gguf", "not a GGUF file")):
        where = f"teacher.path='{tmp_path / path}': "
        done = rhymerl(*settings, "algo=distill", f"teacher.path={tmp_path / path}", f"run_dir={tmp_path / 'run'}")
        assert done.code == 2, done.err
        assert f"{where}{message}" in done.err.splitlines()[-1]
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_reading_the_file_draws_no_bars(words: list[str], tmp_path: Path) -> None:
    """In a process of its own, because tqdm reads what it may do when it is imported."""
    evaluate = [sys.executable, "-m", "rhymerl", "evaluate", *words[1:], f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(evaluate, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0
    assert "GGUF" not in done.stderr


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.write_text("<!DOCTYPE html>"), "not a GGUF file (it does not begin with 'GGUF')"),
        (lambda path: path.write_bytes(b"GGUF" + bytes(9)), "broken or truncated: "),
        (
            lambda path: write_gguf(path, architecture="rwkv7"),
            "GGUF model with architecture rwkv7 is not supported yet.",
        ),
        (lambda path: write_gguf(path, has_tokenizer=False), "it has no tokenizer (tokenizer.ggml.tokens)"),
    ],
    ids=["missing", "another kind", "truncated", "architecture", "tokenizer"],
)
def test_a_bad_file_is_one_line(make, message: str, words: list[str], tmp_path: Path, rhymerl: Run) -> None:
    path = tmp_path / "bad.gguf"
    make(path)
    done = rhymerl(*words, f"model.path={path}", f"run_dir={tmp_path / 'run'}")
    assert done.code == 2
    assert done.err.startswith(f"error: model.path='{path}': ")
    assert message in done.err
    assert done.err.count("\n") == 1, done.err
    assert not (tmp_path / "run").exists()


def test_a_file_that_the_package_has_not_is_one_line(words: list[str], tmp_path: Path, rhymerl: Run) -> None:
    done = rhymerl(*words, "model.path='${package:rhymerl/none.gguf}'", f"run_dir={tmp_path / 'run'}")
    assert done.code == 2
    assert done.err.startswith("error: model.path='${package:rhymerl/none.gguf}': the package 'rhymerl' in ")
    assert done.err.endswith("has no file 'none.gguf'; it has no .gguf file\n")
