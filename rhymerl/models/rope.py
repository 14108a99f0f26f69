"""Rotary position embeddings that follow the longest sequence of a pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from rhymerl.errors import ConfigError
from rhymerl.models.policy import context_tokens, named

# For each kind, the setting that says how long a sequence may be before all positions of its pass are embedded
# otherwise.
_LIMITS = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}


def refuse_changing_rope(model: PreTrainedModel, longest_tokens: int, *, setting: str | None = None) -> None:
    """Raise ConfigError when a sequence of that many tokens would change how its neighbours are computed.

    transformers chooses the frequencies once a pass, by the largest position in it. `setting` names the model in the
    message.
    """
    for kind, most in _changing(model.config.get_text_config()):
        if longest_tokens > most:
            raise ConfigError(
                f"{setting or named(model)}: its rope is {kind!r}, which changes for a whole pass as soon as one sequence is "
                f"longer than {most} tokens, so answers would depend on their neighbours; the longest prompt and its answer have "
                f"{longest_tokens} tokens, expected at most {most} (data.max_prompt_tokens, rollout.max_tokens), or another model"
            )


def refuse_longer(model: PreTrainedModel, longest_tokens: int, *, setting: str) -> None:
    """Raise ConfigError, which names the setting, for sequences beyond the model's context, and as above."""
    if longest_tokens > (context := context_tokens(model.config)):
        raise ConfigError(
            f"{setting}: its context is {context} tokens, a prompt and its answer may have {longest_tokens}"
        )
    refuse_changing_rope(model, longest_tokens, setting=setting)


def _changing(config: PretrainedConfig) -> Iterator[tuple[str, int]]:
    """Yield the kinds of rope that change, with the most tokens up to which each does not."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_layer = [each for each in rope.values() if isinstance(each, Mapping)]
    for each in by_layer or [rope]:
        kind = str(each.get("rope_type", "default"))
        if kind in _LIMITS:
            name = _LIMITS[kind]
            yield kind, int(each.get(name) or getattr(config, name))
