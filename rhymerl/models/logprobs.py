"""Log-probs and entropy of given tokens under the current policy, without ever holding [batch, time, vocabulary].

The body of the model runs on a right-padded batch (causal attention never looks at what follows, so no mask is needed);
the head runs on chunks of response tokens (see head.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rhymerl.algos.base import PolicyOutput
from rhymerl.models.decoder import decoder_of
from rhymerl.models.head import KeptTokens, ReferenceHead, chosen_logprobs, head_logprobs
from rhymerl.models.logits import transform_of
from rhymerl.models.recurrent import at
from rhymerl.models.sharding import call, forget_passes
from rhymerl.models.shared_prefixes import SharedLayout, packed_states, padded, place_runs
from rhymerl.types import IndexArray, IntArray, Sample, Segment

T = TypeVar("T")

# Logits held at a time when `chunk_tokens` is left to us: on a GPU each chunk reads the whole head again, so few large
# ones pay.
_LOGIT_BYTES = 64 * 2**20
_KEPT_BYTES = 256 * 2**20  # of log-probs, which small chunks would compute again; a GPU's chunks are larger
_LOGIT_BYTES_OF_GPU = 2**30
_LOGIT_SHARE_OF_GPU = 1 / 64  # of its memory, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Samples side by side, padded on the right. B = samples, R = parts, S = prompt and response, T = response.

    N = response tokens; in a shared layout those that come after different tokens, so that several samples may have one
    in common.
    """

    input_ids: Tensor  # [R, S], a row for each part of a sample; [1, L] in a shared layout
    indices: Tensor  # [N] flat index into `input_ids` of the token before each
    targets: Tensor  # [N] the tokens
    response: Tensor  # [B, T] bool, where the response tokens stand; [B, T + 1] with positions behind the last ones
    shared: SharedLayout | None = None  # of samples that share their prompts, and what their answers begin with
    places: Tensor | None = None  # in a shared layout: which of the N each response token is
    kept: KeptTokens | None = None  # over which tokens each log-prob is normalised; None: all
    routes: Tensor | None = None  # [tokens in `input_ids`, layers, k] as `Output.routes`; None: no experts are known

    def scatter(self, values: Tensor) -> Tensor:
        """Return the values, [N], at the index of each response token in [B, T]; zeros in the padding."""
        if self.places is not None:
            values = at(values[:, None], self.places)[:, 0]
        blank = torch.zeros(self.response.shape, dtype=values.dtype, device=values.device)
        return blank.masked_scatter(self.response, values)


def token_batch(
    samples: Sequence[Sample], device: torch.device | str, *, behind: bool = False, shares: bool = False
) -> TokenBatch:
    """Lay samples out for one forward pass; with `shares`, equal prompts and common prefixes of answers become one.

    With `behind`, the position of each answer's last token counts too; its target means nothing.
    """
    if shares:
        return _shared_batch(samples, device, behind=behind)
    parts, counts, response = _parts(samples, behind=behind)
    width = max(map(len, parts))
    lines = padded([np.concatenate(part.keys) for part in parts], width)
    ids = lines[:, 0].copy()
    firsts = np.array([len(part.prompt) for part in parts]) - 1 + width * np.arange(len(parts))
    indices = np.concatenate([first + np.arange(count) for first, count in zip(firsts, counts, strict=True)])
    sets = _kept_sets(samples, behind=behind)
    return TokenBatch(
        input_ids=torch.from_numpy(ids).view(len(parts), width).to(device),
        indices=torch.from_numpy(indices).to(device),
        targets=torch.from_numpy(ids.take(indices + 1, mode="clip")).to(device),
        response=torch.from_numpy(response).to(device),
        kept=None if sets is None else KeptTokens.of(sets, device),
        routes=_routes(parts, lines, device),
    )


def _routes(parts: Sequence[Segment], lines: IndexArray, device: torch.device | str) -> Tensor | None:
    """Return those of a pass whose `lines` are of an id and, where the parts have routes, of a route."""
    like = parts[0].routes
    return None if like is None else torch.from_numpy(lines[:, 1:]).unflatten(1, like.shape[1:]).to(device)


def _kept_sets(samples: Sequence[Sample], *, behind: bool) -> list[IntArray] | None:
    """Return what truncation left at each response token of all samples, in order; None where nothing was noted."""
    if all(sample.completion.output.kept is None for sample in samples):
        return None
    found: list[IntArray] = []
    for sample in samples:
        sets = sample.completion.output.kept_sets
        for part in sample.segments:
            found += sets[part.start : part.start + len(part.token_ids)]
        found += [sample.completion.token_ids[:0]] * behind
    return found


def _parts(samples: Sequence[Sample], *, behind: bool) -> tuple[list[Segment], list[int], npt.NDArray[np.bool_]]:
    """Return the parts of all samples, how many positions count in each, and where these stand in [B, T]."""
    parts, counts = list[Segment](), list[int]()
    response = np.zeros((len(samples), max(map(len, samples)) + behind), np.bool_)
    for line, sample in zip(response, samples, strict=True):
        segments = sample.segments
        parts += segments
        counts += [len(part.token_ids) for part in segments]
        counts[-1] += behind
        for part in segments:
            line[part.start : part.start + len(part.token_ids)] = True
        line[len(sample) : len(sample) + behind] = True
    return parts, counts, response


def _shared_batch(samples: Sequence[Sample], device: torch.device | str, *, behind: bool) -> TokenBatch:
    """An answer's last token is computed only if something is asked `behind` it."""
    parts, counts, response = _parts(samples, behind=behind)
    prompts, answers = zip(*(part.keys for part in parts), strict=True)
    placed = place_runs(prompts, [each if behind else each[:-1] for each in answers], device)
    before = np.concatenate([path[:count] for path, count in zip(placed.paths, counts, strict=True)])
    padding = np.zeros(1, np.int32)
    ends = [padding[: count - len(part.token_ids)] for part, count in zip(parts, counts, strict=True)]
    after = np.concatenate([each for part, end in zip(parts, ends, strict=True) for each in (part.token_ids, end)])
    sets, pairs = _kept_sets(samples, behind=behind), before << 32 | after.astype(np.int64)
    keys = pairs
    if sets is not None:  # equal tokens behind equal ones may come from other sets, by rounding or of a newer policy
        numbers: dict[bytes, int] = {}
        which = [numbers.setdefault(each.tobytes(), len(numbers)) for each in sets]
        keys = np.unique(pairs, return_inverse=True)[1] * len(sets) + which
    _, first, places = np.unique(keys, return_index=True, return_inverse=True)
    asked = pairs[first]
    return TokenBatch(
        input_ids=placed.layout.input_ids,
        indices=torch.from_numpy(asked >> 32).to(device),
        targets=torch.from_numpy(asked & 0xFFFFFFFF).to(device),
        response=torch.from_numpy(response).to(device),
        shared=placed.layout,
        places=torch.from_numpy(places).to(device),
        kept=None if sets is None else KeptTokens.of([sets[i] for i in first], device),
        routes=_routes(parts, placed.lines, device),
    )


def hidden_states(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Return the states of a model, with or without its head, in front of each response token, [N, H].

    A model that reads a shared layout has to be within `sharing`; one that is sharded within a `call` of it.
    """
    body = decoder_of(model)
    if batch.shared is not None:
        return at(packed_states(body, batch.shared)[0], batch.indices)
    hidden: Tensor = body(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)[batch.indices]


def policy_output(
    model: PreTrainedModel,
    batch: TokenBatch,
    *,
    temperature: float,
    chunk_tokens: int | None = None,
    critic: Callable[[TokenBatch, Tensor], Tensor] | None = None,
    reference: PreTrainedModel | None = None,
    trains_policy: bool = True,
    trains_entropy: bool = False,
) -> PolicyOutput:
    """Return the response tokens' log-probs and entropy, [B, T] with zeros in the padding.

    With a `critic` there are values, and with a `reference` the divergence from it over the vocabulary.

    log_softmax(logits / temperature) over the batch's `kept` tokens, in float32 or better; temperature 0 uses 1. The
    critic gets the batch and the policy's hidden states, [N, H], and returns [N]. Without `trains_policy` only values
    have a gradient, which ends at these states.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and trains_policy):
        kept_bytes = _KEPT_BYTES if chunk_tokens is None and model.device.type == "cpu" else 0
        other = None if reference is None else _reference_head(reference, batch)
        in_chunks = partial(head_logprobs, kept_bytes=kept_bytes, reference=other)
        hidden, (logprobs, entropy, *divergence) = _states_and(in_chunks, model, batch, temperature, chunk_tokens)
    return PolicyOutput(
        logprobs=batch.scatter(logprobs),
        entropy=batch.scatter(entropy if trains_entropy else entropy.detach()),
        values=None if critic is None else batch.scatter(critic(batch, hidden)),
        divergence=batch.scatter(divergence[0]) if divergence else None,
    )


@torch.no_grad()
def _reference_head(model: PreTrainedModel, batch: TokenBatch) -> ReferenceHead:
    return ReferenceHead(hidden=hidden_states(model, batch), head=_head(model), transform=transform_of(model))


def token_logprobs(
    model: PreTrainedModel, batch: TokenBatch, *, temperature: float, chunk_tokens: int | None = None
) -> Tensor:
    """Return the log-probs of `policy_output`, [B, T], alone and without gradient."""
    with torch.no_grad():
        _, logprobs = _states_and(chosen_logprobs, model, batch, temperature, chunk_tokens)
        forget_passes(model)
        return batch.scatter(logprobs)


def _states_and(
    function: Callable[..., T], model: PreTrainedModel, batch: TokenBatch, temperature: float, chunk_tokens: int | None
) -> tuple[Tensor, T]:
    """Return the hidden states, [N, H], and what one of the functions of head.py says of them."""
    head = _head(model)
    size = chunk_tokens or default_chunk_tokens(head)
    of_head = partial(
        function,
        head=head,
        targets=batch.targets,
        temperature=temperature or 1.0,
        chunk_tokens=size,
        transform=transform_of(model),
        kept=batch.kept,
    )

    def run() -> tuple[Tensor, T]:
        hidden = hidden_states(model, batch)
        return hidden, call(head, of_head, hidden)

    return call(model, run)


def _head(model: PreTrainedModel) -> nn.Module:
    head: nn.Module | None = model.get_output_embeddings()
    assert head is not None, "prove_update has found one"
    return head


def default_chunk_tokens(head: nn.Module) -> int:
    """Return how many tokens' logits are held at a time where nobody says it."""
    weight = head.weight
    assert isinstance(weight, Tensor)
    is_on_gpu = weight.device.type == "cuda"
    memory = torch.cuda.get_device_properties(weight.device).total_memory if is_on_gpu else None
    return usual_chunk_tokens(len(weight), gpu_bytes=memory)


def usual_chunk_tokens(vocabulary: int, *, gpu_bytes: int | None) -> int:
    """Return that number for a GPU of so much memory, or None on a CPU."""
    most = _LOGIT_BYTES if gpu_bytes is None else min(_LOGIT_BYTES_OF_GPU, int(_LOGIT_SHARE_OF_GPU * gpu_bytes))
    return max(1, most // (4 * vocabulary))
