"""What a model would do here, by its config alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from rhymerl.config import compose, instantiate
from rhymerl.engine.support import refuse_unsupported
from rhymerl.errors import ConfigError
from rhymerl.models.decoder import decoder_of
from rhymerl.models.policy import PolicySource, context_tokens
from rhymerl.models.proof import other_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedModel:
    """A model before its weights are loaded. Proofs at the start of a run may still refuse it."""

    name: str  # its class
    num_parameters: int
    num_trained: int
    context_tokens: int
    layers: Mapping[str, int]  # kind of layer -> how many there are
    engine_refuses: str | None  # why the embedded engine does not run it
    shares_no_prompts: str | None  # why the update computes the prompt of each answer by itself


def examine_model(overrides: Sequence[str]) -> ExaminedModel:
    """Return what settings `model.*` lead to. Raises ConfigError where the model cannot be read."""
    model = outline_of(compose("base", overrides).model, use="look at")
    text = model.config.get_text_config()
    engine = None
    try:
        refuse_unsupported(model)
    except ConfigError as error:
        engine = str(error)
    sizes = [(each.numel(), each.requires_grad) for each in model.parameters()]
    return ExaminedModel(
        name=type(model).__name__,
        num_parameters=sum(size for size, _ in sizes),
        num_trained=sum(size for size, is_trained in sizes if is_trained),
        context_tokens=context_tokens(model.config),
        layers=dict(Counter(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)),
        engine_refuses=engine,
        shares_no_prompts=other_attention(decoder_of(model)),
    )


def outline_of(section: Any, *, use: str) -> PreTrainedModel:
    """Return the model of the section `model` without content.

    Raises ConfigError where it has no config to `use`: it is loaded already, or of a class of the user's own.
    """
    source = instantiate(section, key="model")
    if not isinstance(source, PolicySource):
        raise ConfigError(f"model: {type(source).__name__} has no config to {use}; expected model.path or model.init")
    return source.outline()


def lines_of(model: ExaminedModel) -> list[tuple[str, str]]:
    """Return what people read, as (name, words)."""
    trained = f", {model.num_trained:,} trained" if model.num_trained < model.num_parameters else ""
    layers = ", ".join(f"{number} {kind}" for kind, number in model.layers.items())
    shared = "the update computes a prompt once for all of its answers, if the proof at the start of a run agrees"
    if model.shares_no_prompts:
        shared = f"the update computes a prompt for each of its answers, because {model.shares_no_prompts}"
    return [
        ("model", f"{model.name}, {model.num_parameters:,} parameters{trained}"),
        ("layers", layers),
        ("context", f"{model.context_tokens:,} tokens"),
        ("engine", model.engine_refuses or "embedded, if the proof at the start of a run agrees"),
        ("prompts", shared),
    ]
