"""Checkpoints that hold a language model beside towers for images or sound: the language model alone is trained."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file

from rhymerl.models.decoder import decoder_of

_OF_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' class that makes the whole model of a config, its towers too: exports are whole again."""
    return AutoModelForImageTextToText if _has_towers(config) else AutoModelForCausalLM


def _has_towers(config: PretrainedConfig) -> bool:
    return config.get_text_config() is not config and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def language_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return all modules that compute logits of text: those of the decoder, and the output embeddings."""
    head = model.get_output_embeddings()
    return [*decoder_of(model).modules(), *([] if head is None else [head])]


def freeze_towers(model: PreTrainedModel) -> None:
    """Train no parameter that text has nothing to do with; the others stay as they are."""
    if _has_towers(model.config):
        trained = {id(each) for module in language_modules(model) for each in module.parameters(recurse=False)}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in trained)


def processor_files(model: PreTrainedModel, *, is_here: bool = True) -> list[str]:
    """Return the paths of files beside a model that say how its towers are fed; the hub is asked if it is not here."""
    place = model.name_or_path
    if not place or not _has_towers(model.config):
        return []
    found = []
    for name in _OF_PROCESSORS:
        with suppress(OSError):  # there is none
            found.append(cached_file(place, name, local_files_only=is_here))
    return [path for path in found if path is not None]
