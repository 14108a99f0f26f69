"""A proof that the update computes a model: causal states times the output embeddings, scaled and capped as known."""

from __future__ import annotations

import operator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rhymerl.errors import ConfigError
from rhymerl.models.attention import narrowed
from rhymerl.models.decoder import decoder_of
from rhymerl.models.logits import transform_of
from rhymerl.models.policy import evaluating, named, refusing
from rhymerl.models.precision import computing_in
from rhymerl.models.recurrent import RECURRENT, WITHOUT_KEYS
from rhymerl.models.sharding import call, forget_passes, whole
from rhymerl.models.shared_prefixes import packed_states, place_runs, sharing

_NEEDED = "a causal decoder with plain output embeddings is needed (Qwen2, Qwen3, Llama, ...)"
# What rounding may come to, as a share of the largest value. Some layers compute in float32 in any case; models of 16
# bits are computed in float32, unless they are sharded.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 2e-2}
_KNOWN = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers
_OF_HYBRIDS = WITHOUT_KEYS | RECURRENT  # some go from token to token, some look at nothing before a token
_LARGE = 1000.0  # logits far beyond the caps that models have, which leave small ones nearly as they are


def prove_update(model: PreTrainedModel) -> None:
    """Raise ConfigError when body and output embeddings do not make up the model, or it cannot be run like that at all.

    What float32 does not tell from rounding is computed again in float64.
    """
    check_windows(model)
    try:
        _prove_update(model, torch.float32)
    except ConfigError:
        with suppress(ConfigError):  # not every layer can be computed in float64
            return _prove_update(model, torch.float64)
        raise


def check_windows(model: PreTrainedModel) -> None:
    """Raise ConfigError for a window below 1 in the model's config: of a chunk, ours are below 0."""
    config = model.config.get_text_config()
    if set(getattr(config, "layer_types", None) or ()) == {"full_attention"}:
        return  # Qwen2-MoE without windows says sliding_window=0
    for name in ("sliding_window", "attention_chunk_size"):
        value = getattr(config, name, None)
        if value is not None and value < 1:
            raise ConfigError(
                f"{named(model)}: {name}={value} in its config.json; expected at least 1, or null for none"
            )


def _prove_update(model: PreTrainedModel, dtype: torch.dtype) -> None:
    config = model.config.get_text_config()
    with (
        refusing(f"{named(model)}: the update cannot run it; {_NEEDED}"),
        evaluating(model),
        torch.no_grad(),
        computing_in(dtype, model),
    ):
        ids = torch.arange(4, device=model.device)[None] % config.vocab_size
        states = _states(model, ids)
        _check_finite(model, states)
        _check_causal(model, ids, states)
        _check_head(model, ids, states)
        forget_passes(model)


def other_attention(model: PreTrainedModel) -> str | None:
    """Return why our own attention (models/attention.py) would silently differ from this model's, or None.

    Hybrids do not always say which attention interface they use.
    """
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    kinds = layers - _KNOWN - _OF_HYBRIDS
    reasons = {
        f"it has {', '.join(sorted(kinds))} layers": bool(kinds),
        "it is an encoder-decoder": bool(config.is_encoder_decoder),
        "it does not use transformers' attention interface": not (
            model._supports_attention_backend or layers & _OF_HYBRIDS
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def prove_sharing(body: PreTrainedModel, longest_tokens: int, *, model: PreTrainedModel | None = None) -> str | None:
    """Return why this decoder of a `model` cannot compute answers behind one shared prompt; None if it can.

    What float32 does not tell from rounding, which sharp and deep models magnify, is computed again in float64.
    """
    if reason := other_attention(body):
        return reason
    with narrowed(body, longest_tokens):
        return _shared_otherwise(body, model, torch.float32) and _shared_otherwise(body, model, torch.float64)


def _shared_otherwise(body: PreTrainedModel, model: PreTrainedModel | None, dtype: torch.dtype) -> str | None:
    """Return why states behind a shared prompt are no states of the decoder, computed in at least so many bits."""
    numbers = torch.arange(100).remainder(body.config.get_text_config().vocab_size).numpy()
    prompts = [numbers[start : start + length] for start, length in ((1, 3), (2, 5))]
    answers = [
        (0, [7, 8, 9, 10]),
        (1, [14]),
        (0, [7, 8, 21]),
        (1, [28, 29, 30]),
        (0, []),
        (0, [7, 8, 9]),
        (0, [7, 8, 21, 22, 23]),
        (1, [28, 29, 31, 32]),
    ]
    tokens = [numbers[each] for _, each in answers]
    placed = place_runs([prompts[number] for number, _ in answers], tokens, body.device)
    try:
        with refusing("it cannot be run like that"), evaluating(body), torch.no_grad(), computing_in(dtype, body):
            run = operator.call if model is None or model is body else partial(call, model)
            with sharing([body]):
                shared = run(lambda: packed_states(body, placed.layout)[0])
            for (number, _), answer, path in zip(answers, tokens, placed.paths, strict=True):
                ids = torch.from_numpy(np.append(prompts[number], answer))[None].to(body.device)
                states = run(partial(body, input_ids=ids, use_cache=False)).last_hidden_state
                alone = states[0, len(prompts[number]) :]
                if len(answer) and _differ(shared[torch.from_numpy(path[1:]).to(body.device)], alone):
                    return "its states behind a shared prompt are others"
    except ConfigError as error:
        return str(error)
    return None


def _states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    states: Tensor = call(model, lambda: decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state)
    return states


def _check_finite(model: PreTrainedModel, states: Tensor) -> None:
    if states.isfinite().all():
        return
    broken = [name for name, parameter in model.named_parameters() if not whole(parameter).isfinite().all()]
    found = f"{broken[0]} holds NaN or infinities" if broken else "they overflow, though all of its weights are finite"
    raise ConfigError(f"{named(model)}: its hidden states are not finite: {found}; expected a model that is whole")


def _check_causal(model: PreTrainedModel, ids: Tensor, states: Tensor) -> None:
    other = ids.clone()
    other[0, -1] = ids[0, 0]
    if _differ(_states(model, other)[:, :-1], states[:, :-1]):
        raise ConfigError(
            f"{named(model)}: a token's hidden states depend on the tokens that follow it (is_decoder=false in its config.json?), "
            f"which the update does not support; {_NEEDED}"
        )


def _check_head(model: PreTrainedModel, ids: Tensor, states: Tensor) -> None:
    """Check the head and its config's logit transform, at the states and at larger ones, whose logits show a cap."""
    head: Any = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ConfigError(
            f"{named(model)}: it has no output embeddings, without which the update cannot run; {_NEEDED}"
        )
    transform = transform_of(model)
    largest = max(float(call(model, head, states).abs().max()), 1e-6)
    at_cap = [transform.cap / largest] if transform.cap is not None else []
    for factor in (1.0, *at_cap, max(1.0, _LARGE / largest)):
        with head.register_forward_pre_hook(lambda _, inputs, by=factor: (by * inputs[0], *inputs[1:])):
            logits = model(input_ids=ids, use_cache=False).logits
        expected = transform(call(model, head, factor * states))
        if _differ(logits[..., : transform.num_tokens], expected):
            raise ConfigError(
                f"{named(model)}: its logits are more than its output embeddings times its hidden states, which the update does not "
                "support (scaled or soft-capped by no setting that is known?)"
            )


def _differ(left: Tensor, right: Tensor) -> bool:
    """Return whether they differ by more than rounding; NaN differs from everything."""
    difference = (left.double() - right.double()).abs().max()
    return not bool(difference <= _TOLERANCE[right.dtype] * right.double().abs().max())
