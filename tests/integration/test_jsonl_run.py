"""`grpo_jsonl` on files that plain transformers and plain Python wrote: train, evaluate, resume, export."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.integration.conftest import Run, assert_same, checkpoint

# Run by a process that knows nothing of rhymerl.
WRITE_MODEL = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

out, tied, chat = sys.argv[1], sys.argv[2] == "True", sys.argv[3] == "True"
backend = Tokenizer(models.BPE())
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
special = ["<|end|>", "<|user|>", "<|assistant|>"]
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
backend.train_from_iterator(["What is one and two and three? It is six."] * 9, trainer)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")
if chat:
    tokenizer.chat_template = (
        "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=0,
)
model = LlamaForCausalLM(config)
model.generation_config = GenerationConfig(eos_token_id=[0, 2], do_sample=True, temperature=0.7, top_k=11)
model.save_pretrained(out)
tokenizer.save_pretrained(out)
"""

MY_REWARDS = """
import asyncio

async def vowels(completion, *, answer, wanted="aeiou"):
    await asyncio.sleep(0)
    return sum(completion.count(each) for each in wanted) / (1 + len(completion))
"""


@pytest.fixture(
    scope="module",
    params=[(True, True), pytest.param((False, False), marks=pytest.mark.slow)],
    ids=["tied, chat", "untied, strings"],
)
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, data and a reward, as a user would have."""
    tied, chat = request.param
    path = tmp_path_factory.mktemp("user")
    words = [sys.executable, "-c", WRITE_MODEL, str(path / "model"), str(tied), str(chat)]
    subprocess.run(words, check=True, capture_output=True)
    for name, first in (("train", 0), ("held_out", 100)):
        rows = []
        for i in range(first, first + 6):
            text = f"What is {i} and two?"
            prompt: Any = [{"role": "user", "content": text}] if chat else text
            rows.append(json.dumps({"prompt": prompt, "answer": str(i + 2)}))
        (path / f"{name}.jsonl").write_text("\n".join(rows))
    (path / "my_rewards.py").write_text(MY_REWARDS)
    return path


WORDS = [
    "--config=grpo_jsonl",
    "data.train=train.jsonl",
    "data.validation=held_out.jsonl",
    "data.prompts_per_step=3",
    "model.path=model",
    "rewards=null",
    "rewards.mine=my_rewards.vowels",
    "rollout.group_size=4",
    "rollout.max_tokens=12",
    "update.learning_rate=1e-2",
    "algo.kl_coef=0.1",
    "evaluation.every_n_steps=2",
    "trainer.callbacks=[{_target_: tests.integration.programs.KeepMetrics}]",
    "run_dir=run",
    "checkpoint.every_n_steps=1",
]


def test_train_evaluate_resume_export(index: Path, monkeypatch: pytest.MonkeyPatch, rhymerl: Run) -> None:
    monkeypatch.chdir(index)
    done = rhymerl("fit", *WORDS, "trainer.max_steps=3", "--json")
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["steps"] == 3
    assert 0 <= summary["eval_reward_before"] <= 1

    assert rhymerl("fit", *WORDS, "trainer.max_steps=4", "ckpt_path=last").code == 0
    kl = checkpoint(Path("run"))["callbacks"]["KeepMetrics"]["kl"]
    assert len(kl) == 4
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert min(kl[1:]) > 1e-4

    done = rhymerl("evaluate", *WORDS, "ckpt_path=last", "--json")
    assert done.code == 0, done.err
    after = json.loads((Path("run") / "summary.json").read_text())["eval_reward_after"]
    assert json.loads(done.out)["eval/reward"] == pytest.approx(after, abs=1e-7)

    done = rhymerl("export", "run", "out")
    assert (done.code, done.err) == (0, "")
    assert_exported(Path("out"), checkpoint(Path("run")), Path("model"))


def assert_exported(out: Path, saved: dict[str, Any], original: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(out)
    weights = {name.removeprefix("model."): tensor for name, tensor in saved["state_dict"].items()}
    assert_same(dict(model.state_dict()), weights)
    before = AutoModelForCausalLM.from_pretrained(original)
    assert not torch.equal(before.get_input_embeddings().weight, model.get_input_embeddings().weight)
    one, two = AutoTokenizer.from_pretrained(original), AutoTokenizer.from_pretrained(out)
    assert two.chat_template == one.chat_template
    assert two.get_vocab() == one.get_vocab()
    assert two("What is 7 and two?").input_ids == one("What is 7 and two?").input_ids
    one, two = (GenerationConfig.from_pretrained(each).to_dict() for each in (original, out))
    assert two == one
    assert two["eos_token_id"] == [0, 2]
    first, second = ({**json.loads((each / "config.json").read_text())} for each in (original, out))
    assert {**second, "transformers_version": 0} == {**first, "transformers_version": 0}
