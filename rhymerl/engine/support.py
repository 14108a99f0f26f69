"""Which models the engine may run (named reasons first, then a proof on the model itself), and which requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymerl.errors import ConfigError
from rhymerl.policy import evaluating
from rhymerl.types import RolloutRequest

# Largest difference of log-probs (nats) between a packed tree pass and the model's own forward.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.2}


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ConfigError with the reason when a token tree would silently break this model's attention."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    reasons = {
        f"it has {', '.join(sorted(kinds))} layers": bool(kinds),
        f"its attention slides over a window of {sliding} tokens": sliding is not None and not kinds,
        "its attention scores are soft-capped": getattr(config, "attn_logit_softcapping", None) is not None,
        "its attention has sinks": any(name.endswith(".sinks") for name, _ in model.named_parameters()),
        "it is an encoder-decoder": bool(config.is_encoder_decoder),
        "it does not use transformers' attention interface": not model._supports_attention_backend,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(
                f"model {type(model).__name__}: the embedded backend cannot run it, because {reason}; "
                "a decoder with full attention in every layer is needed (Qwen2, Qwen3, Llama, ...)"
            )


def prove(model: PreTrainedModel, autocast: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
    """Run a small random tree in one packed pass and each of its paths through the model alone.

    Raises ConfigError when they differ: some part of this model reads more than the tokens on its own path.
    """
    from rhymerl.engine.attention import packed

    generator = np.random.default_rng(0)
    vocabulary = model.config.get_text_config().vocab_size
    prompt = generator.integers(0, vocabulary, 7)
    paths = [generator.integers(0, vocabulary, 3) for _ in range(2)]
    with packed(model):
        tree = _tree_logprobs(model, prompt, paths, autocast)
    with evaluating(model), torch.no_grad(), autocast():
        alone = [model(torch.from_numpy(np.append(prompt, path))[None].to(model.device)).logits[0] for path in paths]
    expected = torch.cat([logits[len(prompt) :].double().log_softmax(-1) for logits in alone])
    difference = (tree - expected).abs().max().item()
    dtype = alone[0].dtype if alone[0].dtype in _TOLERANCE else torch.bfloat16
    if not difference <= _TOLERANCE[dtype]:
        raise ConfigError(
            f"model {type(model).__name__}: the embedded backend cannot run it: log-probs of a packed token tree differ "
            f"from the model's own by {difference:.2g} nats (at most {_TOLERANCE[dtype]:g} in {dtype})"
        )


def _tree_logprobs(
    model: PreTrainedModel,
    prompt: np.ndarray,
    paths: list[np.ndarray],
    autocast: Callable[[], AbstractContextManager[object]],
) -> Tensor:
    """Log-probs [nodes, vocabulary] after each node, all `paths` hanging below `prompt` in one pass."""
    from rhymerl.engine.attention import AttentionPlan, Bucket
    from rhymerl.engine.kv_store import KVStore

    start, width = len(prompt), len(paths[0])
    total = start + width * len(paths)
    mask = torch.ones(1, total, total, dtype=torch.bool).tril()
    for number in range(1, len(paths)):
        begin = start + number * width
        mask[0, begin : begin + width, start:begin] = False
    positions = [*range(start), *(start + depth for _ in paths for depth in range(width))]
    slots = torch.arange(total, device=model.device)
    store = KVStore(model.config.get_text_config().num_hidden_layers, total)
    store.write_slots = slots
    bucket = Bucket(
        kv_slots=slots,
        mask=mask.to(model.device),
        queries=slots[None],
        valid=torch.ones_like(slots[None], dtype=torch.bool),
    )
    with autocast():
        logits: Tensor = model(
            input_ids=torch.from_numpy(np.concatenate([prompt, *paths]))[None].to(model.device),
            position_ids=torch.tensor([positions], device=model.device),
            past_key_values=store,
            use_cache=True,
            rhymerl_plan=AttentionPlan([bucket]),
        ).logits[0, start:]
    return logits.double().log_softmax(-1)


def refuse_impossible(request: RolloutRequest, context: int) -> None:
    """Raise ConfigError for a request that could never be answered within `context` tokens."""
    sampling, generated = request.sampling, request.generated
    num_prompt = len(request.prompt.token_ids)
    if num_prompt == 0:
        raise ConfigError(f"request {request.id}: the prompt has no tokens")
    if num_prompt + sampling.max_tokens > context:
        raise ConfigError(
            f"request {request.id}: prompt of {num_prompt} + rollout.max_tokens={sampling.max_tokens} is "
            f"{num_prompt + sampling.max_tokens} tokens; at most {context} fit "
            "(the model's context, or backend.kv_tokens if that is smaller)"
        )
    if generated is None or len(generated) == 0:
        return
    if len(generated) >= sampling.max_tokens or int(generated.token_ids[-1]) in sampling.stop_token_ids:
        raise ConfigError(
            f"request {request.id}: has ended already, after {len(generated)} of at most {sampling.max_tokens} tokens; "
            "nothing can follow"
        )
