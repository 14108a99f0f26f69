"""Whatever is wrong costs one readable line and exit code 2, before anything is computed or written."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import Run

GOOD = {"prompt": "1+1=?\n", "answer": "2"}


@pytest.fixture
def index(files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with good and bad files of all kinds, to which no command adds one."""
    monkeypatch.chdir(files)
    before = sorted(files.iterdir())
    yield files
    sys.modules.pop("my_rewards", None)
    shutil.rmtree(files / "__pycache__", ignore_errors=True)
    assert sorted(files.iterdir()) == before


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    tmp_path = tmp_path_factory.mktemp("files")
    (tmp_path / "good.jsonl").write_text(json.dumps(GOOD) + "\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "null.jsonl").write_text(json.dumps({**GOOD, "prompt": None}) + "\n")
    (tmp_path / "broken.jsonl").write_text(json.dumps(GOOD) + '\n{"prompt": "1\n')
    (tmp_path / "no_prompt.jsonl").write_text('{"question": "1+1=?"}\n')
    (tmp_path / "no_answer.jsonl").write_text('{"prompt": "1+1=?"}\n')
    (tmp_path / "odd_answers.jsonl").write_text(
        "\n".join(json.dumps({**GOOD, "answer": answer}) for answer in ("1", None, ["1"]))
    )
    (tmp_path / "gap.jsonl").write_text("\n".join(map(json.dumps, [GOOD, GOOD, {"prompt": "1+1=?"}, GOOD])))
    (tmp_path / "long.jsonl").write_text(json.dumps({**GOOD, "prompt": "1+" * 100}) + "\n")
    (tmp_path / "longish.jsonl").write_text(json.dumps({**GOOD, "prompt": "1+" * 60}) + "\n")
    (tmp_path / "foreign.jsonl").write_text(json.dumps({**GOOD, "prompt": "1×1"}) + "\n")
    (tmp_path / "chat.jsonl").write_text(json.dumps({**GOOD, "prompt": [{"role": "user", "content": "1"}]}) + "\n")
    (tmp_path / "no_model").mkdir()
    for name, file, content in (
        ("bad_config", "config.json", "{"),
        ("bad_weights", "model.safetensors", "xx"),
        ("bad_tokenizer", "tokenizer.json", "{"),
        ("odd_config", "config.json", '{"model_type": "qwen2", "hidden_size": null, "num_attention_heads": "x"}'),
        ("odd_tokenizer", "tokenizer.json", '{"version": "1.0", "model": {"type": "Nope"}, "added_tokens": []}'),
        ("odd_tokenizer_config", "tokenizer_config.json", '{"tokenizer_class": 3, "extra_special_tokens": 5}'),
    ):
        shutil.copytree(model_dir, tmp_path / name)
        (tmp_path / name / file).write_text(content)
    (tmp_path / "a_file").write_text("")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    (tmp_path / "broken.ckpt").write_bytes(b"PK\x03\x04 not much")
    (tmp_path / "my_rewards.py").write_text("def fine(completion):\n    return 1.0\nnot_callable = 3\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rollout.group_sise=2", "unknown setting rollout.group_sise; did you mean rollout.group_size?"),
        (
            "rollout.stop=[end]",
            "unknown setting rollout.stop: there are no stop strings; rollout.stop_token_ids ends answers",
        ),
        ("rollout.group_size=many", "rollout.group_size='many': expected"),
        ("trainer.max_steps=ten", "trainer.max_steps='ten': expected"),
        ("rollout.group_size=1", "rollout.group_size=1"),
        ("rollout.temperature=0", "rollout.temperature=0: greedy answers"),
        ("seed=-1", "seed=-1: expected 0 to"),
        ("backend.kv_tokens=8", "backend.kv_tokens=8: the longest prompt and its answer need"),
        ("update.betas=[0.9]", "update.betas=[0.9]: expected two numbers"),
        ("update.weight_decay=-1", "update.weight_decay=-1"),
        ("rollout.max_tokens=128", "rollout.max_tokens=128 that exceeds the model's context of 128"),
        ("evaluation.max_tokens=200", "evaluation.max_tokens=200 that exceeds the model's context of 128"),
        ("evaluation.max_tokens=0", "evaluation.max_tokens=0: expected at least 1"),
        ("evaluation.temperature=-1", "evaluation.temperature=-1"),
        ("drafter=crystal_ball", "drafter='crystal_ball': expected one of history_tree, ngram, none, paper"),
        ("scheduler=my_module.Mine", "scheduler='my_module.Mine'"),
        ("data.train=nothing.jsonl", "data.train='nothing.jsonl': no such file"),
        (
            "data.train=[good.jsonl,null.jsonl]",
            "data.train[1]='null.jsonl', line 1: data.prompt_column='prompt': the prompt is null",
        ),
        ("data.train=empty.jsonl", "data.train='empty.jsonl': the data set is empty"),
        ("data.train=broken.jsonl", "data.train='broken.jsonl', line 2: not valid JSON"),
        ("data.train=no_prompt.jsonl", "data.train='no_prompt.jsonl', line 1: data.prompt_column='prompt'"),
        ("data.train=no_answer.jsonl", "answer"),
        ("data.train=gap.jsonl", "data.train='gap.jsonl', line 3: no column 'answer', as other rows have it; rewards."),
        (
            "data.train=odd_answers.jsonl",
            "data.train='odd_answers.jsonl', line 2: answer=None: expected a text or a number; 2 of the",
        ),
        ("data.validation=gap.jsonl", "data.validation='gap.jsonl', line 3: no column 'answer'"),
        ("data.train=long.jsonl", "the prompt has 200 tokens: no room for an answer in the model's context of 128"),
        ("data.train=longish.jsonl", "set rollout.max_tokens to at most 8"),
        ("data.validation=longish.jsonl evaluation.max_tokens=9", "set evaluation.max_tokens to at most 8"),
        ("data.train=foreign.jsonl", "'×', which the tokenizer does not know"),
        ("data.train=chat.jsonl", "the tokenizer has no chat template"),
        ("data.validation=nothing.jsonl", "data.validation='nothing.jsonl': no such file"),
        ("data.validation_prompts=3", "data.validation_prompts=3: expected at most 1"),
        ("model.path=no_model", "model.path='no_model': not a model directory (it has no config.json)"),
        ("model.path=/nowhere/at/all", "model.path='/nowhere/at/all': no such directory"),
        ("model.path=a_file", "model.path='a_file'"),
        ("model.path=bad_config", "model.path='bad_config': its config cannot be read: "),
        ("model.path=bad_weights", "model.path='bad_weights': cannot be loaded"),
        ("model.path=bad_tokenizer", "model.path='bad_tokenizer': cannot be loaded"),
        (
            "model.path=odd_config",
            "model.path='odd_config': its config cannot be read: Validation error for field 'hidden_size'",
        ),
        ("model.path=odd_tokenizer", "model.path='odd_tokenizer': cannot be loaded: its tokenizer: "),
        ("model.path=odd_tokenizer_config", "model.path='odd_tokenizer_config': cannot be loaded: its tokenizer: "),
        ("model.dtype=float8", "model.dtype='float8': expected one of"),
        ("rewards={mine: no_such_module.fn}", "no_such_module"),
        ("rewards={mine: my_rewards.fnn}", "fnn"),
        ("rewards={mine: my_rewards.not_callable}", "not_callable"),
        ("rewards=null", "rewards=null: name at least one"),
        ("ckpt_path=last", "ckpt_path='last': there is no file"),
        ("ckpt_path=nothing.ckpt", "ckpt_path='nothing.ckpt': there is no file"),
        ("ckpt_path=other.ckpt", "ckpt_path='other.ckpt': not a checkpoint of rhymerl"),
        ("ckpt_path=broken.ckpt", "ckpt_path='broken.ckpt': not a checkpoint"),
        ("run_dir=a_file/run", "run_dir='a_file/run': Not a directory"),
        ("run_dir=/proc/run", "run_dir='/proc/run'"),
        ("checkpoint.keep=0", "checkpoint.keep=0: expected at least 1"),
        ("checkpoint.every_n_steps=0", "checkpoint.every_n_steps=0: expected at least 1"),
        ("trainer.gradient_clip_val=1.0", "trainer.gradient_clip_val=1.0"),
        ("trainer.accumulate_grad_batches=2", "trainer.accumulate_grad_batches=2"),
        ("trainer.overfit_batches=1", "trainer.overfit_batches=1"),
        ("trainer.precision=16-mixed", "trainer.precision='16-mixed'"),
        ("trainer.precision=float7", "float7"),
        ("trainer.strategy=fsdp", "fsdp"),
        (
            "trainer.strategy=fsdp2 trainer.accelerator=cpu trainer.devices=1",
            "trainer.strategy=fsdp2 with EmbeddedBackend: its engine needs the whole policy in each rank, which has a part of it only; "
            "expected workers with weights of their own, backend=ray (with backend.engine=embedded or sglang) or backend=sglang with backend.url, "
            "backend=embedded with backend.whole_copy=true where a whole policy fits beside the parts, or trainer.strategy=ddp",
        ),
        pytest.param(
            "trainer.strategy=fsdp2 trainer.accelerator=cpu trainer.devices=1 backend=sglang deterministic=false",
            "trainer.strategy=fsdp2 with SGLangBackend: its engine needs the whole policy in each rank",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("sglang") is None, reason="that SGLang is missing is said first"
            ),
        ),
        (
            "trainer.strategy._target_=rhymerl.FSDP2Strategy trainer.strategy.num_replicas=3 trainer.accelerator=cpu trainer.devices=4",
            "trainer.strategy.num_replicas=3: so many groups of one size cannot be made of all ranks; expected a divisor of their number, 4",
        ),
        (
            "trainer.strategy._target_=rhymerl.FSDP2Strategy trainer.strategy.num_replicas=0",
            "trainer.strategy.num_replicas=0: expected at least 1",
        ),
        (
            "trainer.accelerator=mps",
            "trainer.accelerator='mps': this machine has none that torch can use; expected",
        ),
        ("trainer.devices=0", "trainer.devices=0: "),
        ("trainer.limit_train_batches=1.5", "trainer.limit_train_batches=1.5: You have passed invalid value"),
        ("trainer.val_check_interval=2", "evaluation.every_n_steps"),
        (
            "trainer.check_val_every_n_epoch=2",
            "trainer.check_val_every_n_epoch=2: a run sets this itself; use evaluation",
        ),
        (
            "trainer.num_sanity_val_steps=2",
            "trainer.num_sanity_val_steps=2: a run sets this itself; leave it out: where",
        ),
        ("evaluation.every_n_steps=-1", "evaluation.every_n_steps=-1: expected at least 0"),
        ("trainer.default_root_dir=x", "run_dir"),
    ],
)
def test_one_line_and_exit_code_2(words: str, message: str, index: Path, model_dir: Path, rhymerl: Run) -> None:
    good = [
        f"model.path={model_dir}",
        "data.train=good.jsonl",
        "data.validation=good.jsonl",
        "rollout.max_tokens=16",
        "run_dir=run",
    ]
    override = {word.partition("=")[0] for word in ([words] if "{" in words else words.split())}
    wanted = [word for word in good if word.partition("=")[0] not in override]
    done = rhymerl("fit", "--config=grpo_jsonl", *wanted, *([words] if "{" in words else words.split()))
    assert done.code == 2, done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1, done.err
    assert message in done.err
    assert done.out == ""
    assert not any(Path("run").glob("*"))
    assert not Path("run").exists()


def test_a_full_disk(index: Path, model_dir: Path, rhymerl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40, 2**20))
    done = rhymerl("fit", "--config=grpo_jsonl", f"model.path={model_dir}", "data.train=good.jsonl", "run_dir=run")
    assert (done.code, done.err) == (2, "error: run_dir='run': 1 MiB of disk left, at least 64 are needed\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "--config=quickstart", "ckpt_path=last", "run_dir=none"], "ckpt_path='last': there is no file"),
        (["evaluate", "--config=grpo_jsonl", "model.path=MODEL", "data.train=good.jsonl"], "data.validation"),
        (["evaluate", "--config=quickstart", "ckpt_path=other.ckpt"], "not a checkpoint of rhymerl"),
        (["export", "none", "out"], "RUN='none': neither a checkpoint nor a run directory"),
        (["export", "other.ckpt", "out"], "RUN='other.ckpt': not a checkpoint of rhymerl"),
        (["warmstart", "out=a_file/out"], "out='a_file/out': Not a directory"),
        (["warmstart", "out=out", "warmstart.num_steps=0"], "warmstart.num_steps=0: expected at least 1"),
        (
            ["warmstart", "out=out", "warmstart.precision=16-mixed"],
            "warmstart.precision='16-mixed': expected one of 32-true, bf16-mixed",
        ),
        (["warmstart", "out=mine", "task=tests.integration.programs.Silent"], "task: Silent has no demonstrations"),
        (["warmstart", "out=bad_config"], "out='bad_config': holds a model already"),
    ],
)
def test_other_commands(words: list[str], message: str, index: Path, model_dir: Path, rhymerl: Run) -> None:
    done = rhymerl(*(word.replace("MODEL", str(model_dir)) for word in words))
    assert done.code == 2, done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert message in done.err


def test_from_outside(index: Path, model_dir: Path) -> None:
    words = ["fit", "--config", "grpo_jsonl", f"model.path={model_dir}", "data.train=long.jsonl", "run_dir=run"]
    done = subprocess.run([sys.executable, "-m", "rhymerl", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "rhymerl fit, grpo_jsonl: loading torch and Lightning\n")
    assert done.stderr.startswith("error: data.train='long.jsonl', line 1: the prompt has ")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_sglang_that_is_not_installed_is_said_before_anything_is_computed(index: Path, rhymerl: Run) -> None:
    done = rhymerl("fit", "--config=quickstart", "backend=sglang", "run_dir=run")
    assert done.err == "error: backend=sglang needs sglang: pip install 'rhymerl[sglang]'\n"
    assert (done.code, done.out) == (2, "")
    assert not Path("run").exists()
