"""The prompt of several answers, computed once: where everything is in one packed pass, and the attention that reads it.

The pass is a sequence [1, L]. It begins with G prompts, each padded on the right to P tokens, and goes on with buckets of answers of
like length. An answer's tokens attend to its prompt and to those of its own before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from rhymerl.models.padding import best_starts

if TYPE_CHECKING:
    from rhymerl.types import IndexArray, IntArray

NAME = "rhymerl_shared"
_BUCKET_TOKENS = 64  # what another bucket costs, in padded tokens
# Devices on which torch has no kernel for a mask and groups of heads, and writes all scores out.
_WITHOUT_GROUPS = ("cuda",)


@dataclass(slots=True, kw_only=True)
class AnswerBucket:
    """B answers, padded on the right to T tokens."""

    prompts: Tensor  # [B] which prompt each of them follows
    num_tokens: int  # T
    visible: Tensor  # [B or 1, 1, T, P + T] bool: the real tokens of the prompt, and the answer's up to each one
    _mask: Tensor | None = field(default=None)

    def mask(self, like: Tensor) -> Tensor:
        """Return 0 where visible and -inf elsewhere; made once a pass, in the dtype that the first layer brings."""
        if self._mask is None:
            zeros = torch.zeros(self.visible.shape, dtype=like.dtype, device=like.device)
            self._mask = zeros.masked_fill_(~self.visible, float("-inf"))
        return self._mask


@dataclass(slots=True, kw_only=True)
class SharedLayout:
    """A packed pass of G prompts of P tokens and of the answers behind them."""

    input_ids: Tensor  # [1, L]
    position_ids: Tensor  # [1, L]
    num_prompts: int
    buckets: Sequence[AnswerBucket]
    sizes: Sequence[int]  # tokens of all prompts and of each bucket

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return what each token reads: query [1, heads, L, dim], key and value [1, kv_heads, L, dim] -> [1, L, heads, dim]."""
        parts = [each[0].transpose(0, 1).split(self.sizes) for each in (query, key, value)]
        prompts, *answers = zip(*parts, strict=True)
        q, of_keys, of_values = (_in_rows(each, self.num_prompts) for each in prompts)
        found = [_attend(q, of_keys, of_values, scale, mask=None)]
        for bucket, part in zip(self.buckets, answers, strict=True):
            q, k, v = (_in_rows(each, len(bucket.prompts)) for each in part)
            k, v = (torch.cat([of[bucket.prompts], own], 2) for of, own in ((of_keys, k), (of_values, v)))
            found.append(_attend(q, k, v, scale, mask=bucket.mask(q)))
        return torch.cat(found)[None]


def _in_rows(tokens: Tensor, count: int) -> Tensor:
    """[rows * T, heads, dim] -> [rows, heads, T, dim]."""
    return tokens.view(count, -1, *tokens.shape[1:]).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, *, mask: Tensor | None) -> Tensor:
    """Attend by `mask`, without one causally: [rows, heads, T, dim] -> [rows * T, heads, dim]."""
    is_grouped = query.shape[1] != key.shape[1]
    if is_grouped and mask is not None and query.device.type in _WITHOUT_GROUPS:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        is_grouped = False
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
    )
    return out.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A layout, and where each sample's tokens are in it."""

    layout: SharedLayout
    ends: IndexArray  # [B] the flat index of the last token of each sample's prompt
    starts: IndexArray  # [B] that of its answer's first token


def lay_out(prompts: Sequence[IntArray], answers: Sequence[IntArray], device: torch.device | str) -> Placed:
    """Lay out samples whose prompts may be equal; an answer may be empty, as one is whose last token is not to be read."""
    numbers: dict[bytes, int] = {}
    of = np.array([numbers.setdefault(np.ascontiguousarray(each).tobytes(), len(numbers)) for each in prompts])
    distinct = [prompts[int(np.argmax(of == number))] for number in range(len(numbers))]
    lengths = np.array([len(each) for each in distinct])
    widest = int(lengths.max())
    ids, positions = [_padded(distinct, widest)], [np.tile(np.arange(widest), len(distinct))]
    sizes, buckets = [len(distinct) * widest], []
    starts = np.zeros(len(answers), np.int64)
    for rows in _bucketed([len(answer) for answer in answers]):
        width = max(len(answers[row]) for row in rows)
        starts[rows] = sum(sizes) + width * np.arange(len(rows))
        ids.append(_padded([answers[row] for row in rows], width))
        positions.append((_first_position(lengths[of[rows]])[:, None] + np.arange(width)).ravel())
        sizes.append(len(rows) * width)
        buckets.append(_bucket(of[rows], lengths, width, device))
    flat_ids, flat_positions = (torch.from_numpy(np.concatenate(each))[None].to(device) for each in (ids, positions))
    layout = SharedLayout(
        input_ids=flat_ids, position_ids=flat_positions, num_prompts=len(distinct), buckets=buckets, sizes=sizes
    )
    return Placed(layout=layout, ends=of * widest + lengths[of] - 1, starts=starts)


def _first_position(prompt_lengths: IndexArray) -> IndexArray:
    """Return the position of an answer's first token."""
    return prompt_lengths


def _bucketed(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of answers of like length together; empty ones are in none."""
    longest_first = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i))
    widths = [lengths[i] for i in longest_first]
    for start, end in best_starts(widths, [0] * len(widths), max_tokens=None, overhead=_BUCKET_TOKENS):
        yield longest_first[start:end]


def _padded(rows: Sequence[IntArray], width: int) -> IndexArray:
    ids = np.zeros((len(rows), width), np.int64)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = row
    return ids.ravel()


def _bucket(prompts: IndexArray, lengths: IndexArray, width: int, device: torch.device | str) -> AnswerBucket:
    widest = int(lengths.max())
    mine = lengths[prompts]
    seen = torch.from_numpy(mine[:1] if (mine == mine[0]).all() else mine)
    of_prompt = torch.arange(widest) < seen[:, None, None, None]
    own = torch.ones(width, width, dtype=torch.bool).tril()
    visible = torch.cat([of_prompt.expand(-1, 1, width, -1), own.expand(len(seen), 1, -1, -1)], 3)
    return AnswerBucket(prompts=torch.from_numpy(prompts).to(device), num_tokens=width, visible=visible.to(device))


def shared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    rhymerl_shared: SharedLayout,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`SharedLayout.attend` as transformers calls it."""
    return rhymerl_shared.attend(query, key, value, scaling or query.shape[3] ** -0.5), None


AttentionInterface.register(NAME, shared_attention)


@contextmanager
def sharing(models: Iterable[PreTrainedModel]) -> Iterator[None]:
    """Context in which models take `SharedLayout`s; a backward that computes activations again has to be within."""
    configs = [model.config for model in models]
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


def packed_states(body: PreTrainedModel, layout: SharedLayout) -> Tensor:
    """Run a model without its head, within `sharing`: the hidden states of all tokens, [1, L, H]."""
    assert body.config._attn_implementation == NAME, "another attention would read across answers"
    more: dict[str, Any] = {"position_ids": layout.position_ids, "rhymerl_shared": layout}
    states: Tensor = body(input_ids=layout.input_ids, use_cache=False, **more).last_hidden_state
    return states
