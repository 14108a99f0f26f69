"""A reward from a model: a sequence classifier of Hugging Face reads question and answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rhymerl.errors import ConfigError
from rhymerl.rewards.hooks import brings

if TYPE_CHECKING:
    from rhymerl.rewards.base import Reward


def check_classifier(reward: Reward) -> None:
    """Raises ConfigError for what would load no model, or one for every call."""
    setting = f"rewards.{reward.name}"
    path = reward.arguments.get("path")
    if path is None:
        raise ConfigError(f"{setting}.arguments.path is missing: expected the directory of a sequence classifier")
    config = Path(path).expanduser() / "config.json"
    kinds = json.loads(config.read_text()).get("architectures") or [] if config.is_file() else []
    if not any("SequenceClassification" in kind for kind in kinds):
        found = f"a directory of {', '.join(kinds)}" if kinds else "no directory of a model"
        raise ConfigError(f"{setting}.arguments.path={str(path)!r}: {found}; expected one of a sequence classifier")
    for name, value, expected in (("where", reward.where, "engine"), ("batch", reward.batch, True)):
        if value != expected:
            raise ConfigError(f"{setting}.{name}={value!r}: a classifier needs {name}={expected!r}")


@brings(check=check_classifier)
def classifier_score(
    completions: Sequence[str],
    *,
    path: str,
    device: Any = "cpu",
    question: Sequence[str | None] | None = None,
    label: str | None = None,
    max_tokens: int | None = None,
) -> list[float]:
    """The logit of a classifier with one output, the probability of `label` for one with several; for `where="engine"`, `batch`.

    Of the column `question`, where the data has one, and the answer: as a chat if the tokenizer has a template, else as a pair
    of texts. At most `max_tokens` are read (default: as many as the model can). The model is loaded once a process and device.
    Raises ValueError for a label that the model does not have.
    """
    import torch

    tokenizer, model = _load(path, str(device))
    longest = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
    settings = {"padding": True, "truncation": True, "max_length": max_tokens or longest, "return_tensors": "pt"}
    inputs = _encode(tokenizer, completions, question, settings)
    with torch.inference_mode():
        logits = model(**inputs.to(model.device)).logits.float()
    return _scores(logits, model.config.id2label, label)


@lru_cache(maxsize=4)
def _load(path: str, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).to(device).eval()
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, model


def _encode(
    tokenizer: Any, completions: Sequence[str], questions: Sequence[str | None] | None, settings: dict[str, Any]
) -> Any:
    if questions is None or any(question is None for question in questions):
        return tokenizer(list(completions), **settings)
    if not tokenizer.chat_template:
        return tokenizer(list(questions), list(completions), **settings)
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
        for question, completion in zip(questions, completions, strict=True)
    ]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    return tokenizer(texts, add_special_tokens=False, **settings)  # the template writes them


def _scores(logits: Any, labels: dict[int, str], label: str | None) -> list[float]:
    if logits.shape[1] == 1:
        found: list[float] = logits[:, 0].tolist()
        return found
    places = {name: place for place, name in labels.items()}
    if label not in places:
        raise ValueError(f"label={label!r}: expected one of {', '.join(places)}, the classifier's")
    shares: list[float] = logits.softmax(-1)[:, places[label]].tolist()
    return shares
