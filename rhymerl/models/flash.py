"""Attention behind shared prompts by torch's flash kernel (arXiv 2307.08691): a GPU's, in 16 bits, without a mask.

The kernel takes sequences of different lengths, one after the other. Its causal mask is aligned to the end of each
sequence: where there are fewer queries than keys, the last query sees all keys, the one before it all but the last.
So a row's own tokens are queries, and their keys are those of the shared prompt followed by their own. Keys are stored
once for all heads of a group.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.varlen import varlen_attn

from rhymerl.models.attention import LayerAttention
from rhymerl.models.recurrent import TokenPaths, at

log = logging.getLogger(__name__)

_DEVICE, _DTYPES = "cuda", (torch.bfloat16, torch.float16)
_WIDEST = 256  # numbers of a head
_TOLERANCE = 5e-2  # of 16 bits, as a share of the largest value
_EXAMPLE = (1, 4), (5, 5), (3, 70)  # queries and keys of sequences


def _dtype(values: Tensor) -> torch.dtype:
    """Return the dtype in which torch's own attention would compute."""
    kind = values.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else values.dtype


def can_attend(query: Tensor, keys: Tensor, values: Tensor, layer: LayerAttention) -> bool:
    """Return whether the kernel takes [L, heads, dim] and [L, kv_heads, dim], and has been proved right for these."""
    dtype, dim = _dtype(values), values.shape[2]
    return (
        values.device.type == _DEVICE
        and dtype in _DTYPES
        and keys.shape == values.shape
        and dim % 8 == 0
        and dim <= _WIDEST
        and not layer.needs_scores
        and (layer.window is None or layer.window > 0)
        and _is_right(values.device, dtype, query.shape[1], *values.shape[1:])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """R sequences of queries, one behind the other, and the keys that each reads."""

    read: Tensor  # [K] the flat index of each key
    query_starts: Tensor  # [R + 1] int32
    key_starts: Tensor
    most: tuple[int, int]  # queries and keys of one

    @classmethod
    def of(cls, paths: TokenPaths) -> Sequences:
        """Return those of a packed pass: prompts, and the runs of all buckets, each with its padding behind it."""
        prompts, *own = paths.own
        lines = list(prompts)
        for before, runs in zip(paths.before, own, strict=True):
            lines += [np.concatenate(both) for both in zip(before, runs, strict=True)]
        queries = [each.shape[1] for each in paths.own for _ in each]
        return cls._of_lengths(np.concatenate(lines), queries, list(map(len, lines)), paths.device)

    @classmethod
    def _of_lengths(cls, read: Any, queries: list[int], keys: list[int], device: torch.device | str) -> Sequences:
        starts = np.cumsum([[0, *queries], [0, *keys]], 1, dtype=np.int32)
        query_starts, key_starts = torch.from_numpy(starts).to(device)
        return cls(
            read=torch.from_numpy(read).to(device),
            query_starts=query_starts,
            key_starts=key_starts,
            most=(max(queries), max(keys)),
        )

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
        """Return what the queries [L, heads, dim] read of keys and values [L, kv_heads, dim], of their shape."""
        dtype = _dtype(values)
        k, v = (at(each.to(dtype).flatten(1), self.read).view(-1, *each.shape[1:]) for each in (keys, values))
        seen = (-1 if window is None else window - 1, 0)
        found: Tensor = _kernel()(
            query.to(dtype), k, v, self.query_starts, self.key_starts, *self.most, scale=scale, window_size=seen
        )
        return found


@functools.cache
def _kernel() -> Any:
    """Return torch's function, which takes fewer heads of keys than of queries; newer releases only when asked to."""
    is_told = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if is_told else varlen_attn


@functools.cache
def _is_right(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Return whether the kernel runs here, backwards too, and computes what masks do on an example; else warn."""
    try:
        difference = _difference(device, dtype, heads, kv_heads, dim)
    except Exception as error:  # noqa: BLE001 a GPU that it is not for, or a release of torch that calls it otherwise
        why = str(error)
    else:
        if difference <= _TOLERANCE:
            return True
        why = "it computes something else"
    log.warning("shared prompts are attended to by masks, which is slower: torch's flash kernel: %s", why)
    return False


def _difference(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> float:
    """Return by how much attention and its gradients differ from those by masks, as a share of the largest value."""
    queries, keys = map(list, zip(*_EXAMPLE, strict=True))
    ends = list(zip(pairwise(np.cumsum([0, *queries])), pairwise(np.cumsum([0, *keys])), strict=True))
    numbers, differences = np.random.default_rng(0), []
    with _by_itself(device):
        sequences = Sequences._of_lengths(np.arange(sum(keys)), queries, keys, device)
        q, k, v = inputs = [
            torch.from_numpy(numbers.standard_normal((count, group, dim))).to(device, dtype).requires_grad_()
            for count, group in ((sum(queries), heads), (sum(keys), kv_heads), (sum(keys), kv_heads))
        ]
        for window in (None, 3):
            by_mask = torch.cat([_by_mask(q[a:b], k[c:d], v[c:d], window) for (a, b), (c, d) in ends])
            expected = _with_gradients(by_mask, inputs)
            found = _with_gradients(sequences.attend(q, k, v, dim**-0.5, window), inputs)
            differences += [(x - y).abs().max() / y.abs().max() for x, y in zip(found, expected, strict=True)]
    return float(torch.stack(differences).max())


@contextmanager
def _by_itself(device: torch.device) -> Iterator[None]:
    """Context in which gradients are computed apart from the pass around it, which may have none or checkpoints."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
    ):
        yield


def _with_gradients(attended: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return what queries read, and the gradients of its product with them, in float64; `inputs` begin with queries."""
    gradients = torch.autograd.grad(attended, inputs, inputs[0].detach().to(attended.dtype))
    return [each.detach().double() for each in (attended, *gradients)]


def _by_mask(query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """[Q, heads, dim], [S, kv_heads, dim] -> [Q, heads, dim] float32."""
    group, ahead = query.shape[1] // keys.shape[1], len(keys) - len(query)
    visible = torch.ones(len(query), len(keys), dtype=torch.bool, device=query.device).tril(ahead)
    if window is not None:
        visible = visible.triu(ahead - window + 1)
    q, k, v = (each.float().transpose(0, 1) for each in (query, keys, values))
    k, v = (each.repeat_interleave(group, 0) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(0, 1)
