"""Log-probs and entropy of given tokens under the current policy, without ever holding [batch, time, vocabulary].

The body of the model runs on a right-padded batch (causal attention never looks at what follows, so no mask is needed);
the head runs on chunks of response tokens (see head.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rhymerl.algos.base import PolicyOutput
from rhymerl.models.head import chosen_logprobs, head_logprobs
from rhymerl.types import Sample

_LOGIT_BYTES = 64 * 2**20  # logits held at a time when `chunk_tokens` is left to us


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Samples side by side, padded on the right. B = samples, S = prompt and response, T = response."""

    input_ids: Tensor  # [B, S]
    indices: Tensor  # [N] flat index into [B, S] of the token before each response token
    targets: Tensor  # [N] the response tokens
    response: Tensor  # [B, T] bool, where the N response tokens stand; [B, T + 1] with positions behind the last ones

    def spread(self, values: Tensor) -> Tensor:
        """Return the value of each response token, [N], at its index in [B, T]; zeros in the padding."""
        blank = torch.zeros(self.response.shape, dtype=values.dtype, device=values.device)
        return blank.masked_scatter(self.response, values)


def token_batch(samples: Sequence[Sample], device: torch.device | str, *, behind: bool = False) -> TokenBatch:
    """Lay samples out for one forward pass.

    With `behind`, the position of each answer's last token counts too; its target means nothing.
    """
    prompts = [len(sample.prompt.token_ids) for sample in samples]
    lengths = [len(sample) for sample in samples]
    width = max(p + n for p, n in zip(prompts, lengths, strict=True))
    ids = np.zeros((len(samples), width), np.int64)
    for line, sample, start, count in zip(ids, samples, prompts, lengths, strict=True):
        line[:start] = sample.prompt.token_ids
        line[start : start + count] = sample.completion.token_ids
    column = np.arange(max(lengths) + behind)
    response = column < np.array(lengths)[:, None] + behind
    before = np.arange(len(samples))[:, None] * width + np.array(prompts)[:, None] - 1 + column
    indices = before[response]
    return TokenBatch(
        input_ids=torch.from_numpy(ids).to(device),
        indices=torch.from_numpy(indices).to(device),
        targets=torch.from_numpy(ids.take(indices + 1, mode="clip")).to(device),
        response=torch.from_numpy(response).to(device),
    )


def hidden_states(body: nn.Module, batch: TokenBatch) -> Tensor:
    """Return the states of a model without its head in front of each response token, [N, H]."""
    hidden: Tensor = body(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)[batch.indices]


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
    """Return the log-probs of the response tokens and the entropy at each, [B, T] with zeros in the padding; values with a `critic`.

    Untruncated log_softmax(logits / temperature), in float32 or better; temperature 0 uses 1. The critic gets the batch and
    the policy's hidden states, [N, H], and returns [N]. Without `trains_policy` only values have a gradient, which ends
    at these states.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and trains_policy):
        hidden = hidden_states(model.get_decoder(), batch)
        head = _head(model)
        size = chunk_tokens or _chunk_tokens(head)
        logprobs, entropy = head_logprobs(
            hidden, head, batch.targets, temperature=temperature or 1.0, chunk_tokens=size
        )
    return PolicyOutput(
        logprobs=batch.spread(logprobs),
        entropy=batch.spread(entropy if trains_entropy else entropy.detach()),
        values=None if critic is None else batch.spread(critic(batch, hidden)),
    )


def token_logprobs(
    model: PreTrainedModel, batch: TokenBatch, *, temperature: float, chunk_tokens: int | None = None
) -> Tensor:
    """Return the log-probs of `policy_output`, [B, T], alone and without gradient."""
    with torch.no_grad():
        hidden, head = hidden_states(model.get_decoder(), batch), _head(model)
        size = chunk_tokens or _chunk_tokens(head)
        return batch.spread(
            chosen_logprobs(hidden, head, batch.targets, temperature=temperature or 1.0, chunk_tokens=size)
        )


def _head(model: PreTrainedModel) -> nn.Module:
    head: nn.Module | None = model.get_output_embeddings()
    assert head is not None, "prove_update has found one"
    return head


def _chunk_tokens(head: nn.Module) -> int:
    weight = head.weight
    assert isinstance(weight, Tensor)
    return max(1, _LOGIT_BYTES // (4 * len(weight)))
