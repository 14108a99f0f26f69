"""The models and requests that the engine accepts: named reasons first, then a proof on the model itself."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymerl.drafts import Draft, DraftBatch, no_drafts
from rhymerl.errors import ConfigError
from rhymerl.models.attention import narrowed
from rhymerl.models.logits import num_tokens
from rhymerl.models.policy import context_tokens, evaluating, named, refusing
from rhymerl.models.precision import computing_in
from rhymerl.models.proof import check_windows, other_attention
from rhymerl.models.rope import refuse_changing_rope
from rhymerl.types import RolloutRequest

# Largest difference of log-probs between a packed tree pass and the model's own forward, as a share of how far the
# log-probs after two paths are apart: a model at its first weights says little, a sharp one a lot.
# Some layers compute in float32 in any case.
_SHARE = {torch.float64: 1e-5, torch.float32: 1e-3}
_NEEDED = "a decoder of attention, short convolutions, gated delta nets and Mamba 2 is needed (Qwen2, Qwen3, Llama, Gemma, Mistral, ...)"


def refuse_unsupported(model: PreTrainedModel, longest_tokens: int | None = None) -> None:
    """Raise ConfigError with the reason when a token tree would silently break this model's attention.

    `longest_tokens` is the longest sequence that will come, by default the model's context.
    """
    longest = context_tokens(model.config) if longest_tokens is None else longest_tokens
    refuse_changing_rope(model, longest)
    if reason := other_attention(model):
        raise ConfigError(f"{_cannot_run(model)}, because {reason}; {_NEEDED}")


def _cannot_run(model: PreTrainedModel) -> str:
    return f"{named(model)}: the embedded backend cannot run it"


def prove_engine(model: PreTrainedModel) -> None:
    """Compare a packed pass over a small random tree with passes over each of its paths, in float32 at least.

    Raises ConfigError when they differ (some part of this model reads more than the tokens on its own path), and when
    the model cannot be run in such a pass at all. What float32 does not tell from rounding is computed again in
    float64. A window that a sequence of the model's context reaches is narrowed so that it shows.
    """
    check_windows(model)
    with narrowed(model, context_tokens(model.config)):
        _prove_engine(model)


def _prove_engine(model: PreTrainedModel) -> None:
    difference, most = _difference(model, torch.float32)
    if not difference <= most:
        with suppress(ConfigError):  # not every layer can be computed in float64
            difference, most = _difference(model, torch.float64)
    if not difference <= most:
        raise ConfigError(
            f"{_cannot_run(model)}: log-probs of a packed token tree differ from the model's own by {difference:.2g} nats "
            f"(at most {most:.2g}); {_NEEDED}"
        )


def _difference(model: PreTrainedModel, dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest difference of log-probs, computed in `dtype` at least, and how large rounding may make it."""
    generator = np.random.default_rng(0)
    vocabulary = model.config.get_text_config().vocab_size
    prompt = generator.integers(0, vocabulary, 7)
    paths = [generator.integers(0, vocabulary, 3) for _ in range(2)]
    with refusing(f"{_cannot_run(model)}; {_NEEDED}"), computing_in(dtype, model):
        tree = _tree_logits(model, prompt, paths)
        alone = _logits_alone(model, prompt, paths)
    expected = alone.double().log_softmax(-1)
    first, second = expected.chunk(len(paths))
    share = _SHARE.get(model.dtype, _SHARE[torch.float32])
    return (
        (tree.double().log_softmax(-1) - expected).abs().max().item(),
        share * (first - second).abs().max().item(),
    )


def _logits_alone(model: PreTrainedModel, prompt: np.ndarray, paths: list[np.ndarray]) -> Tensor:
    """Return [nodes, num_tokens] after each node, from a pass of the model's own for each of `paths`."""
    inputs = [torch.from_numpy(np.append(prompt, path))[None].to(model.device) for path in paths]
    with evaluating(model), torch.no_grad():
        return torch.cat([model(input_ids=each).logits[0, len(prompt) :, : num_tokens(model)] for each in inputs])


def _tree_logits(model: PreTrainedModel, prompt: np.ndarray, paths: list[np.ndarray]) -> Tensor:
    """Return [nodes, num_tokens] after each node, all `paths` hanging below `prompt`, which another pass has stored."""
    from rhymerl.engine.forward import Forward
    from rhymerl.engine.kv_store import KVStore
    from rhymerl.engine.layout import lay_out_pass
    from rhymerl.engine.rows import Rows

    nodes = np.concatenate(paths)
    parents = np.arange(-1, len(nodes) - 1, dtype=np.int32)
    parents[:: len(paths[0])] = -1
    total = len(prompt) + len(nodes)
    store = KVStore(model.config.get_text_config().num_hidden_layers, total)
    rows = Rows(1, total, store.pool)
    row = np.array([rows.enter_prefix(prompt).row])
    drafts = DraftBatch.pack([Draft(token_ids=nodes, parents=parents)])
    forward = Forward(model, store, autocast=nullcontext)
    with forward.ready():
        forward.logits(lay_out_pass(rows, row, rows.length[row] - 1, np.empty(0, np.int64), no_drafts(0)))
        rows.cached[row] = rows.length[row] - 1
        logits, _ = forward.logits(lay_out_pass(rows, row, np.array([1]), np.arange(1), drafts))
    return logits[1:]


def _extremes(request: RolloutRequest) -> tuple[int, int]:
    return int(request.prompt.token_ids.max()), int(request.prompt.token_ids.min())


def refuse_impossible(request: RolloutRequest, context: int, *, vocabulary: int | None = None) -> None:
    """Raise ConfigError for a request that could never be answered within `context` tokens and `vocabulary` ids."""
    sampling, generated = request.sampling, request.output
    num_prompt = len(request.prompt.token_ids)
    if num_prompt == 0:
        raise ConfigError(f"request {request.id}: the prompt has no tokens")
    beyond = [] if vocabulary is None else [each for each in _extremes(request) if not 0 <= each < vocabulary]
    if beyond:
        raise ConfigError(
            f"request {request.id}: the prompt holds token {beyond[0]}, the model's embedding has {vocabulary} rows; "
            "model.path needs the tokenizer that the model was trained with"
        )
    if num_prompt + sampling.max_tokens > context:
        raise ConfigError(
            f"request {request.id}: prompt of {num_prompt} + rollout.max_tokens={sampling.max_tokens} is "
            f"{num_prompt + sampling.max_tokens} tokens; at most {context} fit "
            "(the model's context, or backend.kv_tokens or what the run was checked for if that is smaller)"
        )
    if generated is None or len(generated) == 0 or (generated.turns and generated.turns[-1].stop == len(generated)):
        return  # behind a reply, which may end with any token, sampling goes on
    if len(generated) >= sampling.max_tokens or int(generated.token_ids[-1]) in sampling.stop_token_ids:
        raise ConfigError(
            f"request {request.id}: has ended already, after {len(generated)} of at most {sampling.max_tokens} tokens; "
            "nothing can follow"
        )
