"""A model that cannot be used costs one readable line and exit code 2, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rhymerl.models.policy import Policy, PolicySource
from rhymerl.models.tokenizers import character_tokenizer
from rhymerl.testing import tiny_policy
from tests.integration.conftest import Run
from tests.models.small import LATENT, small_model
from tests.models.test_rope import LONGROPE


def family(model_type: str, **settings: Any) -> Policy:
    tokenizer = character_tokenizer("0123456789+=;#? \n")
    return Policy(model=small_model(model_type, max_position_embeddings=256, **settings), tokenizer=tokenizer)


def without_tokenizer(folder: Path) -> None:
    tiny_policy(dtype="float32").save(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)


def with_more_tokens(folder: Path) -> None:
    tiny_policy(dtype="float32").save(folder)
    character_tokenizer("0123456789+=;#? \nabc").save_pretrained(folder)


def not_finite(folder: Path) -> None:
    policy = tiny_policy(dtype="float32")
    with torch.no_grad():
        policy.model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    policy.save(folder)


def saved(make: Callable[[], Policy]) -> Callable[[Path], None]:
    return lambda folder: make().save(folder)


def changed(file: str, **settings: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        tiny_policy(dtype="float32").save(folder)
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))

    return make


def adapter(folder: Path) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "owner/base"}')


OWN_CODE = "it brings Python code of its own, which is never run; expected a model that transformers has itself"
MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "longrope": (saved(lambda: tiny_policy("llama", dtype="float32", rope_parameters=LONGROPE)),
                 "its rope is 'longrope', which changes for a whole pass as soon as one sequence is longer than 32 tokens"),
    "nemotron": (saved(lambda: family("nemotron")), "(NemotronForCausalLM): the embedded backend cannot run it"),
    "deepseek": (saved(lambda: family("deepseek_v32", **LATENT)), "(DeepseekV32ForCausalLM): the embedded backend cannot run it"),
    "no window": (saved(lambda: family("mistral", sliding_window=0)), "sliding_window=0 in its config.json; expected at least 1"),
    "no tokenizer": (without_tokenizer, "it has no tokenizer (tokenizer.json, ...)"),
    "more tokens": (with_more_tokens, "tokens, its embedding 19, none of them for 'a'"),
    "own code": (changed("config.json", model_type="mine", auto_map={"AutoConfig": "mine.Mine"}), OWN_CODE),
    "adapter": (adapter, "a LoRA adapter of 'owner/base', not a model; merge it into that "
                "(merge_and_unload of peft), and name the merged model's directory"),
    "nan": (not_finite, "its hidden states are not finite: model.layers.0.mlp.up_proj.weight holds NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_one_line_and_exit_code_2(name: str, tmp_path: Path, rhymerl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda words: pytest.fail("somebody reads from stdin"))
    save, message = MODELS[name]
    save(tmp_path / "a_model")
    Path("good.jsonl").write_text(json.dumps({"prompt": "1+1=?\n", "answer": "2"}) + "\n")
    words = ["data.train=good.jsonl", "data.validation=good.jsonl", "rollout.max_tokens=32", "run_dir=run"]
    done = rhymerl("fit", "--config=grpo_jsonl", "model.path=a_model", *words)
    assert done.code == 2, done.err
    assert done.err.startswith("error: model.path='a_model'")
    assert done.err.count("\n") == 1, done.err
    assert message in done.err
    assert not any(Path("run").glob("checkpoints/*"))


def test_a_padding_token_beyond_the_embedding_is_never_fed_and_does_no_harm(tmp_path: Path) -> None:
    policy = tiny_policy(dtype="float32")
    policy.tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    policy.save(tmp_path)
    loaded = PolicySource(str(tmp_path)).load()
    assert loaded.tokenizer.pad_token_id == loaded.model.get_input_embeddings().weight.shape[0]
