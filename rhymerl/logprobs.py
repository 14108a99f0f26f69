"""Log-probs and entropy of given tokens under the current policy, without ever holding [batch, time, vocabulary].

The body of the model runs on a right-padded batch (causal attention never looks at what follows, so no mask is needed);
the head runs on chunks of response tokens, and the backward pass computes each chunk again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rhymerl.algos.base import PolicyOutput
from rhymerl.errors import ConfigError
from rhymerl.policy import evaluating
from rhymerl.types import Sample

_LOGIT_BYTES = 64 * 2**20  # logits held at a time when `chunk_tokens` is left to us


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Samples side by side, padded on the right. B = samples, S = prompt and response, T = response."""

    input_ids: Tensor  # [B, S]
    places: Tensor  # [N] flat index into [B, S] of the token before each response token
    targets: Tensor  # [N] the response tokens
    response: Tensor  # [B, T] bool, where the N response tokens stand

    def spread(self, values: Tensor) -> Tensor:
        """What is of each response token, [N], at its place in [B, T]; zeros in the padding."""
        blank = torch.zeros(self.response.shape, dtype=values.dtype, device=values.device)
        return blank.masked_scatter(self.response, values)


def token_batch(samples: Sequence[Sample], device: torch.device | str) -> TokenBatch:
    """Lay samples out for one forward pass."""
    prompts = [len(sample.prompt.token_ids) for sample in samples]
    lengths = [len(sample) for sample in samples]
    width = max(p + n for p, n in zip(prompts, lengths, strict=True))
    ids = np.zeros((len(samples), width), np.int64)
    for line, sample, start, count in zip(ids, samples, prompts, lengths, strict=True):
        line[:start] = sample.prompt.token_ids
        line[start : start + count] = sample.completion.token_ids
    column = np.arange(max(lengths))
    response = column < np.array(lengths)[:, None]
    before = np.arange(len(samples))[:, None] * width + np.array(prompts)[:, None] - 1 + column
    places = before[response]
    return TokenBatch(
        input_ids=torch.from_numpy(ids).to(device),
        places=torch.from_numpy(places).to(device),
        targets=torch.from_numpy(ids.reshape(-1)[places + 1]).to(device),
        response=torch.from_numpy(response).to(device),
    )


def hidden_states(body: nn.Module, batch: TokenBatch) -> Tensor:
    """Of a model without its head, in front of each response token, [N, H]."""
    hidden: Tensor = body(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)[batch.places]


def policy_output(
    model: PreTrainedModel,
    batch: TokenBatch,
    *,
    temperature: float,
    chunk_tokens: int | None = None,
    critic: Callable[[TokenBatch, Tensor], Tensor] | None = None,
    trains_policy: bool = True,
    trains_entropy: bool = False,
) -> PolicyOutput:
    """Log-probs of the response tokens and the entropy at each, [B, T] with zeros in the padding; values with a `critic`.

    Untruncated log_softmax(logits / temperature), in float32 or better; temperature 0 uses 1. The critic gets the batch and
    the policy's hidden states, [N, H], and returns [N]. Without `trains_policy` only values have a gradient, which ends
    at these states.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and trains_policy):
        hidden = hidden_states(model.get_decoder(), batch)
        head = model.get_output_embeddings()
        assert head is not None
        logprobs, entropy = head_logprobs(
            hidden,
            head,
            batch.targets,
            temperature=temperature or 1.0,
            chunk_tokens=chunk_tokens or max(1, _LOGIT_BYTES // (4 * int(head.weight.shape[0]))),
            trains_entropy=trains_entropy,
        )
    return PolicyOutput(
        logprobs=batch.spread(logprobs),
        entropy=batch.spread(entropy),
        values=None if critic is None else batch.spread(critic(batch, hidden)),
    )


def head_logprobs(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    trains_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy at it, [N] and [N], from hidden states [N, H]."""
    chunks = list(zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True))
    # One chunk is small enough to keep; more are recomputed in the backward pass.
    again = len(chunks) > 1 and torch.is_grad_enabled()
    parts = [
        checkpoint(_chunk_logprobs, each, head, target, temperature, trains_entropy, use_reentrant=False)
        if again
        else _chunk_logprobs(each, head, target, temperature, trains_entropy)
        for each, target in chunks
    ]
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def _chunk_logprobs(
    hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float, trains_entropy: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    everything = logits.log_softmax(-1)
    chosen = everything.gather(-1, targets[:, None])[:, 0]
    # What exp makes of less is too small for a float32's exponent: ten times as slow, and it adds nothing.
    if trains_entropy:
        held = everything.clamp(min=-80)
        return chosen, -(held.exp() * held).sum(-1)
    with torch.no_grad():
        held = everything.clamp(min=-80)
        return chosen, -held.exp().mul_(held).sum(-1)


def prove_head(model: PreTrainedModel) -> None:
    """Raise ConfigError when body and output embeddings do not make up the model (it scales or caps its logits)."""
    ids = torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
    with evaluating(model), torch.no_grad():
        head = model.get_output_embeddings()
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        same = head is not None and torch.allclose(head(hidden), model(input_ids=ids).logits, atol=1e-3, rtol=1e-3)
    if not same:
        raise ConfigError(
            f"model {type(model).__name__}: its logits are more than its output embeddings times its hidden states "
            "(scaled or soft-capped?), which the update does not support"
        )
