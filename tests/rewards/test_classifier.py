"""A reward from a sequence classifier, a tiny one written to the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForSequenceClassification,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from rhymerl.errors import ConfigError
from rhymerl.models.tokenizers import character_tokenizer
from rhymerl.rewards import Reward, RewardScorer, check_reward
from rhymerl.rewards.classifier import _load, classifier_score

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"


def write(folder: Path, *, labels: tuple[Any, ...] = ("score",), template: str | None = None) -> str:
    torch.manual_seed(0)
    tokenizer = character_tokenizer("0123456789+=ua")
    tokenizer.chat_template = template
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(labels)),
        label2id={name: index for index, name in enumerate(labels)},
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def alone(path: str, text: str) -> torch.Tensor:
    """The logits of one text, tokenized here."""
    tokenizer, model = _load(path, "cpu")
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    with torch.inference_mode():
        return model(input_ids=ids).logits[0]


def test_one_output_is_the_score_whatever_else_is_in_the_batch(tmp_path: Path) -> None:
    path = write(tmp_path)
    texts = ["1+1=2", "7", "12345678"]
    scores = classifier_score(texts, path=path)
    assert scores == pytest.approx([float(alone(path, text)[0]) for text in texts], abs=1e-5)
    assert len({round(score, 4) for score in scores}) == 3


def test_the_probability_of_a_label(tmp_path: Path) -> None:
    path = write(tmp_path, labels=("bad", "good", "fine"))
    (score,) = classifier_score(["1+1=2"], path=path, label="good")
    assert score == pytest.approx(float(alone(path, "1+1=2").softmax(0)[1]), abs=1e-6)
    with pytest.raises(ValueError, match="label=None: expected one of bad, good, fine"):
        classifier_score(["1"], path=path)


def test_the_question_comes_first(tmp_path: Path) -> None:
    path = write(tmp_path / "pair")
    paired = classifier_score(["2"], path=path, question=["1+1="])
    assert paired == pytest.approx([float(alone(path, "1+1=2")[0])], abs=1e-5)
    path = write(tmp_path / "chat", template=TEMPLATE)
    chatted = classifier_score(["2"], path=path, question=["1+1="])
    assert chatted == pytest.approx([float(alone(path, "u1+1=a2")[0])], abs=1e-5)


def test_long_answers_are_cut(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert classifier_score(["1" * 50], path=path) == classifier_score(["1" * 16], path=path)
    assert classifier_score(["1234"], path=path, max_tokens=2) == classifier_score(["12"], path=path)
    assert classifier_score(["1" * 50], path=path, max_tokens=20) == classifier_score(["1" * 16], path=path)


def write_another(folder: Path, model: PreTrainedModel, *, max_tokens: int | None = None) -> str:
    tokenizer = character_tokenizer("0123456789")
    tokenizer.model_max_length = max_tokens or tokenizer.model_max_length
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_tokenizer_knows_how_much_a_model_can_read(tmp_path: Path) -> None:
    """Some positions of RoBERTa are nobody's, so it has more of them than it reads."""
    sizes = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = RobertaConfig(**sizes, num_hidden_layers=1, max_position_embeddings=17, pad_token_id=0, num_labels=1)
    path = write_another(tmp_path, RobertaForSequenceClassification(config), max_tokens=16)
    assert classifier_score(["1" * 50], path=path) == classifier_score(["1" * 16], path=path)


def test_a_model_without_a_limit_reads_all(tmp_path: Path) -> None:
    config = BloomConfig(vocab_size=12, hidden_size=16, n_layer=1, n_head=2, pad_token_id=0, num_labels=1)
    path = write_another(tmp_path, BloomForSequenceClassification(config))
    text = "1" * 600
    assert classifier_score([f"{text}2"], path=path) != classifier_score([text], path=path)


def test_the_path_may_be_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "judge")
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {"where": "engine", "batch": True, "arguments": {"path": "~/judge"}}
    check_reward(Reward("rhymerl.rewards.classifier_score", **given), [])
    assert classifier_score(["1"], path="~/judge") == classifier_score(["1"], path=path)


def test_as_a_reward_of_a_run(tmp_path: Path) -> None:
    """Loaded once, on the device that the engine has."""
    path = write(tmp_path)
    reward = Reward("rhymerl.rewards.classifier_score", where="engine", batch=True, arguments={"path": path})
    check_reward(reward, ["answer"])
    _load.cache_clear()
    with RewardScorer([reward], chunk_size=2) as scorer:
        for number in range(5):
            scorer.submit(str(number), str(number), {"answer": "1"})
        scores = [each["classifier_score"] for each in scorer.collect(device="cpu").values()]
    assert scores == pytest.approx(classifier_score([str(number) for number in range(5)], path=path), abs=1e-5)
    assert _load.cache_info().misses == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arguments": {}}, "rewards.judge.arguments.path is missing: expected the directory of a sequence classifier"),
        ({"arguments": {"path": "nowhere"}}, "rewards.judge.arguments.path='nowhere': no directory of a model"),
        ({"where": "pool"}, "rewards.judge.where='pool': a classifier needs where='engine'"),
        ({"batch": False}, "rewards.judge.batch=False: a classifier needs batch=True"),
        ({"arguments": {"path": 7}}, "rewards.judge.arguments.path=7: expected the directory of a sequence classifier"),
    ],
)
def test_what_is_refused_before_a_run(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    given = {"where": "engine", "batch": True, "arguments": {"path": write(tmp_path)}, **settings}
    with pytest.raises(ConfigError) as error:
        check_reward(Reward("rhymerl.rewards.classifier_score", name="judge", **given), [])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("labels", "arguments", "message"),
    [
        (("bad", "good"), {"label": "good"}, ""),
        (("bad", "good"), {}, "label is missing: expected one of bad, good, the classifier's"),
        (("bad", "good"), {"label": "fine"}, "label='fine': expected one of bad, good, the classifier's"),
        (("bad", "good"), {"label": ["good"]}, "label=['good']: expected one of bad, good, the classifier's"),
        (("LABEL_0", "LABEL_1"), {"label": "LABEL_1"}, ""),  # the names that transformers leaves out of a config.json
        (("LABEL_0", "LABEL_1"), {}, "label is missing: expected one of LABEL_0, LABEL_1, the classifier's"),
        ((0, 1), {"label": 1}, ""),
        ((0, 1), {"label": "1"}, "label='1': expected one of 0, 1, the classifier's"),
        (("score",), {}, ""),
        (("score",), {"label": "score"}, ""),
        (("score",), {"label": "good"}, "label='good': expected none, as the classifier has one output"),
        (("score",), {"max_tokens": 8}, ""),
        (("score",), {"max_tokens": 0}, "max_tokens=0: expected a number of tokens, at least 1"),
        (("score",), {"max_tokens": "8"}, "max_tokens='8': expected a number of tokens, at least 1"),
    ],
)
def test_which_arguments_are_refused(
    tmp_path: Path, labels: tuple[Any, ...], arguments: dict[str, Any], message: str
) -> None:
    given = {"path": write(tmp_path, labels=labels), **arguments}
    reward = Reward("rhymerl.rewards.classifier_score", name="judge", where="engine", batch=True, arguments=given)
    if not message:
        check_reward(reward, [])
        assert len(classifier_score(["1"], **given)) == 1
        return
    with pytest.raises(ConfigError) as error:
        check_reward(reward, [])
    assert str(error.value) == f"rewards.judge.arguments.{message}"


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    reward = Reward("rhymerl.rewards.classifier_score", where="engine", batch=True, arguments={"path": str(tmp_path)})
    with pytest.raises(ConfigError, match="a directory of Qwen2ForCausalLM; expected one of a sequence classifier"):
        check_reward(reward, [])


def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    reward = Reward("rhymerl.rewards.classifier_score", where="engine", batch=True, arguments={"path": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"arguments\.path=.*: its config\.json is no JSON object; expected"):
        check_reward(reward, [])


def test_a_language_model_under_the_name_of_a_classifier_has_no_head(tmp_path: Path) -> None:
    """Its head would be another random one in each process."""
    path = write(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["score.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    reward = Reward(classifier_score, name="judge", where="engine", batch=True, arguments={"path": path})
    with pytest.raises(ConfigError, match=r"^rewards\.judge\.arguments\.path=.*: it has no weights for score\.weight$"):
        check_reward(reward, [])
    with pytest.raises(ConfigError, match=r"it has no weights for score\.weight"):
        classifier_score(["1"], path=path)
