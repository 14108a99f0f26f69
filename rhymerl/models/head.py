"""Log-probs and entropy from hidden states, by chunks of logits.

N = tokens, H = hidden, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rhymerl.models.logits import PLAIN, LogitTransform
from rhymerl.models.sharding import is_sharded

if TYPE_CHECKING:
    from rhymerl.types import IndexArray, IntArray

_LEAST = -80.0  # what exp makes of less is too small for a float32's exponent: ten times as slow, and it adds nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """A set of ids for each token, one after another; an empty one is the whole vocabulary."""

    token_ids: Tensor  # [ends[-1]]
    counts: Tensor  # [N]
    ends: IndexArray  # [N + 1] in the host's memory, which then knows shapes without waiting for a device

    @classmethod
    def of(cls, sets: Sequence[IntArray], device: torch.device | str) -> KeptTokens:
        counts = np.array([len(each) for each in sets], np.int64)
        ids = np.concatenate([np.empty(0, np.int32), *sets]).astype(np.int64)
        ends = np.concatenate([[0], counts.cumsum()])
        return cls(token_ids=torch.from_numpy(ids).to(device), counts=torch.from_numpy(counts).to(device), ends=ends)

    def only(self, logits: Tensor, part: slice) -> Tensor:
        """Return the logits of the tokens in `part`, [n, V], with -inf outside their sets."""
        first, last, counts = int(self.ends[part.start]), int(self.ends[part.stop]), self.counts[part]
        lines = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=last - first)
        is_out = (counts > 0)[:, None].repeat(1, logits.shape[-1])
        is_out[lines, self.token_ids[first:last]] = False
        return logits.masked_fill(is_out, float("-inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceHead:
    """What a reference, which has no gradient, says of the same tokens."""

    hidden: Tensor  # [N, its own H]
    head: nn.Module
    transform: LogitTransform

    @torch.no_grad()
    def logprobs(self, temperature: float, kept: KeptTokens | None, part: slice) -> Tensor:
        """Return the log-probs of all tokens in front of those in `part`, [n, V]."""
        return _log_softmax(self.head(self.hidden[part]), temperature, self.transform, kept, part)


def head_logprobs(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    kept_bytes: int = 0,
    transform: LogitTransform = PLAIN,
    kept: KeptTokens | None = None,
    reference: ReferenceHead | None = None,
) -> tuple[Tensor, ...]:
    """Return each target's log-prob and the entropy there, [N] and [N], with gradients, from states [N, H].

    Both are over `kept` (None: all tokens), in float32 or better. For a linear head, at most three chunks of logits are
    held at a time, one more where they are capped and one where some are kept, and its gradient is added up in one
    place. All log-probs are held where they are no more than `kept_bytes`; else the backward pass computes them again.
    With a `reference` there is also the divergence from it, [N], and some more chunks are held at a time.
    """
    if reference is None and is_linear(head):
        dtype = _product_dtype(hidden, head.weight)
        found: tuple[Tensor, Tensor] = _Linear.apply(
            hidden, head.weight, head.bias, targets, temperature, chunk_tokens, kept_bytes, dtype, transform, kept
        )  # type: ignore[no-untyped-call]
        return found

    def of_chunk(hidden: Tensor, part: slice) -> tuple[Tensor, ...]:
        everything = _log_softmax(head(hidden[part]), temperature, transform, kept, part)
        found = _chosen(everything, targets[part]), _entropy(everything)
        if reference is None:
            return found
        return *found, _divergence(everything, reference.logprobs(temperature, kept, part))

    slices = _slices(len(hidden), chunk_tokens)
    parts = [checkpoint(of_chunk, hidden, part, use_reentrant=False) for part in slices]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def is_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a head is a plain matrix, sharded or not, and maybe a bias."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def chosen_logprobs(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    transform: LogitTransform = PLAIN,
    kept: KeptTokens | None = None,
) -> Tensor:
    """Return the log-probs alone, without gradient."""
    logits = head.forward if is_sharded(head) else head  # gathered once, and not for each chunk
    with torch.no_grad():
        parts = [
            _chosen(_log_softmax(logits(hidden[part]), temperature, transform, kept, part), targets[part])
            for part in _slices(len(hidden), chunk_tokens)
        ]
        return torch.cat(parts)


class _Linear(torch.autograd.Function):
    """Each chunk's logits are computed again in the backward pass, but for those that are few enough to keep."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        kept_bytes: int,
        dtype: torch.dtype,
        transform: LogitTransform,
        among: KeptTokens | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.dtype, ctx.transform, ctx.among = temperature, dtype, transform, among
        ctx.slices = list(_slices(len(hidden), chunk_tokens))
        ctx.set_materialize_grads(False)
        cast = _Cast(weight, bias, dtype, transform.num_tokens)
        logprobs, entropy, kept = [], [], []
        keeps = len(ctx.slices) == 1 or len(hidden) * len(weight) * max(4, hidden.dtype.itemsize) <= kept_bytes
        for part in ctx.slices:
            everything = _log_softmax(cast.products(hidden[part]), temperature, transform, among, part)
            logprobs.append(_chosen(everything, targets[part]))
            entropy.append(_entropy(everything))
            if keeps:
                kept.append(everything)
            del everything  # before the next one is made
        found = torch.cat(logprobs), torch.cat(entropy)
        ctx.save_for_backward(hidden, weight, bias, targets, found[1], *kept)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_logprobs is None and of_entropy is None:
            return (None,) * 10
        hidden, weight, bias, targets, entropy, *kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        num_tokens = ctx.transform.num_tokens
        cast = _Cast(weight, bias, ctx.dtype, num_tokens)
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        # What a half-precision sum of many chunks would lose is small, but the same in each step.
        to_weight = torch.zeros_like(weight, dtype=_summed(weight)) if needs_weight else None
        to_bias = torch.zeros_like(bias, dtype=_summed(bias)) if needs_bias else None
        for part, known in zip(ctx.slices, kept or [None] * len(ctx.slices), strict=True):
            everything, slope = known, ctx.transform.scale
            if known is None or ctx.transform.cap is not None:
                products = cast.products(hidden[part])
                if known is None:
                    everything = _log_softmax(products, ctx.temperature, ctx.transform, ctx.among, part)
                slope = ctx.transform.slope(_in_full(products))
                del products
            gradient = _gradient(
                everything,
                targets[part],
                entropy[part],
                None if of_logprobs is None else of_logprobs[part],
                None if of_entropy is None else of_entropy[part],
            )
            del everything
            if not ctx.transform.is_plain:
                gradient.mul_(slope)
            if ctx.temperature != 1:
                gradient.div_(ctx.temperature)
            gradient = gradient.to(ctx.dtype)
            if to_hidden is not None:
                to_hidden[part] = gradient @ cast.weight
            if to_weight is not None:
                _add_product(to_weight[:num_tokens], gradient.T, hidden[part].to(ctx.dtype))
            if to_bias is not None:
                to_bias[:num_tokens] += gradient.sum(0)
            del gradient, slope  # before the next ones are made
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        to_bias = None if to_bias is None else to_bias.to(bias.dtype)
        return to_hidden, to_weight, to_bias, None, None, None, None, None, None, None


class _Cast:
    """A linear head in the dtype of its product, for the first `num_tokens` (None: all)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, num_tokens: int | None) -> None:
        self.weight = weight[:num_tokens].to(dtype)
        self.bias = None if bias is None else bias[:num_tokens].to(dtype)

    def products(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


def _summed(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which gradients of chunks are added up."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _in_full(products: Tensor) -> Tensor:
    return products if products.dtype == torch.float64 else products.float()


def _log_softmax(
    products: Tensor, temperature: float, transform: LogitTransform, kept: KeptTokens | None, part: slice
) -> Tensor:
    """Return the log-softmax of a part's logits, [n, V] in float32 or better, over what is kept of them."""
    logits = transform(_in_full(products))
    if temperature != 1:
        logits = logits / temperature
    return (logits if kept is None else kept.only(logits, part)).log_softmax(-1)


def _chosen(everything: Tensor, targets: Tensor) -> Tensor:
    return everything.gather(-1, targets[:, None])[:, 0]


def _entropy(everything: Tensor) -> Tensor:
    """Return the entropy of each line: [N, V] -> [N]."""
    held = everything.clamp(min=_LEAST)
    return -(held.exp() * held).sum(-1) if held.requires_grad else -held.exp().mul_(held).sum(-1)


def _gradient(
    everything: Tensor, targets: Tensor, entropy: Tensor, of_logprobs: Tensor | None, of_entropy: Tensor | None
) -> Tensor:
    """Return the gradient with respect to the logits over the temperature z, [N, V].

    With p = exp(everything), that of log p(target) is 1[target] - p, and that of the entropy is -p (log p + entropy).
    """
    gradient = everything.clamp(min=_LEAST).exp_()
    if of_entropy is not None:
        weight = everything.clamp(min=_LEAST).add_(entropy[:, None]).mul_(of_entropy[:, None])
        gradient.mul_(weight if of_logprobs is None else weight.add_(of_logprobs[:, None])).neg_()
    elif of_logprobs is not None:
        gradient.mul_(-of_logprobs[:, None])
    if of_logprobs is not None:
        gradient.scatter_add_(-1, targets[:, None], of_logprobs[:, None])
    return gradient


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _divergence(everything: Tensor, others: Tensor) -> Tensor:
    """Return the sum of p (log p - log q) of each line: [N, V] -> [N]; tokens that were not kept count nothing."""
    gap = (everything - others).masked_fill(everything.isneginf(), 0)
    return (everything.clamp(min=_LEAST).exp() * gap).sum(-1)
