"""A reward from a model: a sequence classifier of Hugging Face reads question and answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rhymerl.errors import ConfigError
from rhymerl.rewards.arguments import check_argument, is_integer
from rhymerl.rewards.hooks import brings

if TYPE_CHECKING:
    from rhymerl.rewards.base import Reward

_NO_LIMIT = 2**31  # a tokenizer that knows none says 1e30, some models -1


def check_classifier(reward: Reward) -> None:
    """Raises ConfigError for what would load no model, or one for every call, or fail at every answer."""
    setting = f"rewards.{reward.name}"
    expected = "the directory of a sequence classifier"
    if reward.arguments.get("path") is None:
        raise ConfigError(f"{setting}.arguments.path is missing: expected {expected}")
    check_argument(reward, "path", lambda value: isinstance(value, str | Path), expected)
    for name, value, needed in (("where", reward.where, "engine"), ("batch", reward.batch, True)):
        if value != needed:
            raise ConfigError(f"{setting}.{name}={value!r}: a classifier needs {name}={needed!r}")
    labels = _labels_in(reward)
    check_argument(reward, "max_tokens", _is_limit, "a number of tokens, at least 1")
    _check_label(reward, labels)


def _labels_in(reward: Reward) -> list[str]:
    """Return the labels. Raises ConfigError for no classifier, and for safetensors files of a model without its head.

    Whatever else is missing is told when it is loaded.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from rhymerl.models.deferred import names_in
    from rhymerl.models.loading import refuse_missing

    folder = _folder(reward.arguments["path"])
    setting = f"rewards.{reward.name}.arguments.path={str(reward.arguments['path'])!r}"
    file = folder / "config.json"
    try:
        kinds = dict(json.loads(file.read_text())).get("architectures") or [] if file.is_file() else []
    except (TypeError, ValueError) as error:
        words = "its config.json is no JSON object; expected the directory of a sequence classifier"
        raise ConfigError(f"{setting}: {words}") from error
    if not any("SequenceClassification" in kind for kind in kinds):
        found = f"a directory of {', '.join(kinds)}" if kinds else "no directory of a model"
        raise ConfigError(f"{setting}: {found}; expected one of a sequence classifier")
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except ValueError as error:  # of an unknown type, perhaps with code of its own, which is never run
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{setting}: cannot be loaded: {reason}") from error
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    head = {name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}
    if names := names_in(str(folder), is_here=True):
        refuse_missing(head - names.keys(), setting)
    return list(config.id2label.values())


def _folder(path: str | Path) -> Path:
    return Path(path).expanduser()


def _check_label(reward: Reward, labels: list[str]) -> None:
    label = reward.arguments.get("label")
    if label in labels or (label is None and len(labels) == 1):
        return
    words = f"expected one of {', '.join(map(str, labels))}, the classifier's"
    if len(labels) == 1:
        words = "expected none, as the classifier has one output"
    found = "label is missing" if label is None else f"label={label!r}"
    raise ConfigError(f"rewards.{reward.name}.arguments.{found}: {words}")


def _is_limit(value: object) -> bool:
    return value is None or (is_integer(value) and value > 0)


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
    """Return a classifier's logit, or the probability of `label` if it has several outputs.

    It runs with `where="engine"` and `batch`. It reads the column `question`, where the data has one, and the answer:
    as a chat if the tokenizer has a template, else as a pair of texts. At most `max_tokens` are read (default: as many
    as the model can). The model is loaded once a process and device. Raises ValueError for a label that the model does
    not have.
    """
    import torch

    tokenizer, model = _load(path, str(device))
    longest = _longest(model.config, tokenizer, max_tokens)
    settings = {"padding": True, "truncation": longest is not None, "max_length": longest, "return_tensors": "pt"}
    inputs = _encode(tokenizer, completions, question, settings)
    with torch.inference_mode():
        logits = model(**inputs.to(model.device)).logits.float()
    return _scores(logits, model.config.id2label, label)


@lru_cache(maxsize=4)
def _load(path: str, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from rhymerl.models.loading import read_model

    folder = str(_folder(path))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    where = f"arguments.path={path!r}"
    model: Any = read_model(AutoModelForSequenceClassification, where, pretrained_model_name_or_path=folder)
    model.to(device).eval()
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, model


def _longest(config: Any, tokenizer: Any, max_tokens: int | None) -> int | None:
    """Return how many tokens the model reads; None where nothing limits them.

    RoBERTa and its like have more positions than they read: their tokenizers know.
    """
    limits = (getattr(config, "max_position_embeddings", None), tokenizer.model_max_length, max_tokens)
    return min((limit for limit in limits if limit is not None and 0 < limit < _NO_LIMIT), default=None)


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
    indices = {name: index for index, name in labels.items()}
    if label not in indices:
        raise ValueError(f"label={label!r}: expected one of {', '.join(map(str, indices))}, the classifier's")
    shares: list[float] = logits.softmax(-1)[:, indices[label]].tolist()
    return shares
