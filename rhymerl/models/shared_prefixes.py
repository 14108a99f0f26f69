"""Shared prefixes of answers, computed once: the layout of one packed pass, and the attention that reads it.

The pass is a sequence [1, L]. It begins with G prompts, each padded on the right to P tokens, and goes on with buckets
of runs of like length. A run is an answer, or what is left of one that begins as another does: it reads its prompt, the
tokens of others with which its answer begins, and its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from rhymerl.models import flash
from rhymerl.models.attention import FULL, LayerAttention, at_positions, attend_by_scores, last_seen
from rhymerl.models.padding import best_starts
from rhymerl.models.recurrent import BEHIND_PROMPTS, TokenPaths, at, plug_in
from rhymerl.types import IndexArray, IntArray

NAME = "rhymerl_shared"
_BUCKET_TOKENS = 64  # what another bucket costs, in padded tokens
_BLOCK = 256  # queries that have a mask together; a longer run has a bucket of its own
_LEAST_SHARE = 8  # of an answer's tokens one in so many has to be another's too, else it is a run of its own
_ALIGNED = 8  # numbers: of masks whose lines begin elsewhere the kernels of a GPU make copies
# Devices on which torch has no kernel for a mask and groups of heads, and writes all scores out.
_WITHOUT_GROUPS = ("cuda",)


@dataclass(slots=True, kw_only=True)
class RunBucket:
    """B runs of tokens, padded on the right to T; each reads up to C others that stand before it, and its own.

    Queries attend in blocks of W, each to the keys up to its own end. One mask serves all blocks of a long run, since
    they differ in nothing but how many keys stand before theirs: a block takes as many of its columns.
    """

    read: Tensor  # [B, C + T] flat indices: of the tokens before it, those of its prompt first, padded on the right to C; and of its own
    visible: Tensor  # [B or 1, 1, W, C + E + W] bool: the real ones before it, E own ones that the last block has before it, and the block's up to each one
    width: int  # T
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, layer: LayerAttention) -> Tensor:
        """Return what B * T queries read, [B * T, heads, dim], of all keys and values, [L, kv_heads, dim]."""
        q = _in_rows(query, len(self.read))
        k, v = (_for_heads(_at(each, self.read), q, layer) for each in (keys, values))
        block, before = self.visible.shape[2], k.shape[2] - self.width
        last = self.visible.shape[3] - before - block
        found = [
            _attend(
                q[:, :, start : start + block],
                k[:, :, : before + start + block],
                v[:, :, : before + start + block],
                scale,
                layer,
                mask=self.mask(
                    q, layer.window, self.width - start, slice(last - start, before + last + self.width - start)
                ),
            )
            for start in range(0, self.width, block)
        ]
        return (found[0] if len(found) == 1 else torch.cat(found, 1)).flatten(0, 1)

    def mask(self, like: Tensor, window: int | None, queries: int, keys: slice) -> Tensor:
        """Return 0 where visible and -inf elsewhere, of a block's keys, in the dtype of the first layer.

        It is made once a pass and window. Of chunks, where they begin depends on the block.
        """
        if window is not None and window < 0:
            return _additive(last_seen(self.visible[:, :, :queries, keys], window), like)
        if window not in self._masks:
            visible = self.visible if window is None else last_seen(self.visible, window)
            self._masks[window] = _additive(visible, like)
        return self._masks[window][:, :, :queries, keys]


@dataclass(slots=True, kw_only=True)
class SharedLayout:
    """A packed pass of G prompts of P tokens and of the answers behind them."""

    input_ids: Tensor  # [1, L]
    position_ids: Tensor  # [1, L]
    buckets: Sequence[RunBucket]
    sizes: Sequence[int]  # tokens of all prompts and of each bucket
    paths: TokenPaths
    _prompts: RunBucket | None = field(default=None)
    _sequences: flash.Sequences | None = field(default=None)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, layer: LayerAttention = FULL) -> Tensor:
        """Return attention [1, L, heads, dim] from query [1, heads, L, dim] and key, value [1, kv_heads, L, dim]."""
        queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
        if flash.can_attend(queries, keys, values, layer):
            self._sequences = self._sequences or flash.Sequences.of(self.paths)
            return self._sequences.attend(queries, keys, values, scale, layer.window)[None]
        of_prompts, *of_runs = queries.split(self.sizes)
        found = [self._attend_prompts(of_prompts, keys, values, scale, layer)]
        for bucket, part in zip(self.buckets, of_runs, strict=True):
            found.append(bucket.attend(part, keys, values, scale, layer))
        return torch.cat(found)[None]

    def _attend_prompts(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, layer: LayerAttention
    ) -> Tensor:
        """Prompts of full attention need no mask; others are runs before which there is nothing."""
        if layer is FULL:
            q, k, v = (_in_rows(each[: self.sizes[0]], len(self.paths.lengths)) for each in (query, keys, values))
            return _attend(q, k, v, scale, FULL, mask=None).flatten(0, 1)
        if self._prompts is None:
            nothing = [np.empty(0, np.int64)] * len(self.paths.lengths)
            self._prompts = _bucket(nothing, self.paths.own[0], query.device)
        return self._prompts.attend(query, keys, values, scale, layer)


def _additive(visible: Tensor, like: Tensor) -> Tensor:
    *size, width = visible.shape
    zeros = torch.zeros(*size, width + -width % _ALIGNED, dtype=like.dtype, device=like.device)[..., :width]
    return zeros.masked_fill_(~visible, float("-inf"))


def _in_rows(tokens: Tensor, count: int) -> Tensor:
    """[rows * T, heads, dim] -> [rows, heads, T, dim]."""
    return tokens.reshape(count, -1, *tokens.shape[1:]).transpose(1, 2)


def _at(tokens: Tensor, read: Tensor) -> Tensor:
    """[L, heads, dim] at [rows, S] -> [rows, heads, S, dim]."""
    return at(tokens.flatten(1), read).view(*read.shape, *tokens.shape[1:]).transpose(1, 2)


def _for_heads(keys: Tensor, query: Tensor, layer: LayerAttention) -> Tensor:
    """Return keys or values, [rows, kv_heads, S, dim], for a masked attention of these queries."""
    needs_all = layer.needs_scores or query.device.type in _WITHOUT_GROUPS
    if needs_all and query.shape[1] != keys.shape[1]:
        return keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)
    return keys


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, layer: LayerAttention, *, mask: Tensor | None
) -> Tensor:
    """Attend by `mask`, without one causally: [rows, heads, T, dim] -> [rows, T, heads, dim]."""
    if layer.needs_scores:
        assert mask is not None
        sinks = None if layer.sinks is None else layer.sinks[:, None, None]
        out = attend_by_scores(query, key, value, scale, mask=mask, softcap=layer.softcap, sinks=sinks)
    else:
        is_grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
        )
    return out.transpose(1, 2)


def of_one_prompt(prompts: Sequence[IntArray]) -> list[list[int]]:
    """Return the indices of equal prompts together, in the order in which they come first."""
    groups = defaultdict[bytes, list[int]](list)
    for index, prompt in enumerate(prompts):
        groups[prompt.tobytes()].append(index)
    return list(groups.values())


def side_by_side(answers: Sequence[IntArray]) -> list[tuple[int, int]]:
    """Return an order of a prompt's answers in which similar ones are neighbours.

    Each entry is an answer's index, and the number of tokens that it shares with the one before. In sorted order no
    earlier answer shares more with one than its neighbour does. Few tokens in common count as none.
    """
    order = sorted(range(len(answers)), key=lambda i: answers[i].astype(">u4").tobytes())
    found = [(order[0], 0)] if order else []
    for last, number in pairwise(order):
        same = _common(answers[last], answers[number])
        found.append((number, same if same * _LEAST_SHARE >= len(answers[number]) else 0))
    return found


def _common(one: IntArray, other: IntArray) -> int:
    """Return how many tokens both begin with."""
    length = min(len(one), len(other))
    differs = (one[:length] != other[:length]).reshape(length, one[:1].size).any(1)
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A layout, and where each sample's tokens are in it."""

    layout: SharedLayout
    lines: IndexArray  # [L, 1 + layers * k] the ids of the pass, and the routes of what came with some
    paths: Sequence[IndexArray]  # B times [1 + T] the flat indices of its prompt's last token and of its answer's


def place_runs(prompts: Sequence[IntArray], answers: Sequence[IntArray], device: torch.device | str) -> Placed:
    """Lay out samples, whose prompts may be equal, and whose answers may be empty (a last token, not read).

    Prompts and answers are ids, or lines of an id and its route (`Segment.keys`).
    """
    distinct, runs = _runs(prompts, answers)
    widest = max(map(len, distinct))
    before = np.array([len(distinct[run.prompt]) + run.num_shared for run in runs])
    ids, positions = [padded(distinct, widest)], [np.tile(np.arange(widest), len(distinct))]
    own = [np.arange(len(distinct) * widest).reshape(len(distinct), widest)]
    starts, together = np.zeros(len(runs), np.int64), _bucketed(runs)
    for chosen in together:
        width = len(runs[chosen[0]].tokens)
        own.append(own[-1].max() + 1 + np.arange(len(chosen) * width).reshape(len(chosen), width))
        starts[chosen] = own[-1][:, 0]
        ids.append(padded([runs[i].tokens for i in chosen], width))
        first, lengths = before[chosen][:, None], [[len(runs[i].tokens)] for i in chosen]
        # Padding stays within the context, and within what a rope that changes with the longest position takes for
        # short.
        positions.append((first + np.minimum(np.arange(width), np.array(lengths) - 1)).ravel())
    lines = _lines(runs, starts, distinct, widest)
    flat = np.concatenate(ids)
    flat_ids, flat_positions = (
        torch.from_numpy(each)[None].to(device) for each in (flat[:, 0].copy(), np.concatenate(positions))
    )
    lines_before = [[lines[i][: before[i]] for i in each] for each in together]
    layout = SharedLayout(
        input_ids=flat_ids,
        position_ids=flat_positions,
        buckets=[_bucket(*each, device) for each in zip(lines_before, own[1:], strict=True)],
        sizes=[each.size for each in own],
        paths=TokenPaths(
            lengths=np.array([len(each) for each in distinct]),
            before=lines_before,
            own=own,
            device=device,
        ),
    )
    paths = {run.row: line[len(distinct[run.prompt]) - 1 :] for run, line in zip(runs, lines, strict=True)}
    return Placed(layout=layout, lines=flat, paths=[paths[row] for row in range(len(answers))])


@dataclass(frozen=True, slots=True)
class _Run:
    """What is left of a sample's answer, which may begin as the one of the run before does."""

    row: int  # of the sample
    prompt: int  # its number
    num_shared: int  # tokens that it shares with that one
    tokens: IntArray


def _runs(prompts: Sequence[IntArray], answers: Sequence[IntArray]) -> tuple[list[IntArray], list[_Run]]:
    """Return the distinct prompts, and a run of each sample, those with a prompt in one piece."""
    groups = of_one_prompt(prompts)
    runs = [
        _Run(rows[index], number, same, answers[rows[index]][same:])
        for number, rows in enumerate(groups)
        for index, same in side_by_side([answers[row] for row in rows])
    ]
    return [prompts[rows[0]] for rows in groups], runs


def _lines(runs: Sequence[_Run], starts: IndexArray, distinct: Sequence[IntArray], widest: int) -> list[IndexArray]:
    """Return the flat indices of each run's sample: its prompt's tokens, the shared first tokens, and its own."""
    lines: list[IndexArray] = []
    for run, start in zip(runs, starts, strict=True):
        own, length = start + np.arange(len(run.tokens)), len(distinct[run.prompt])
        last = lines[-1] if run.num_shared else widest * run.prompt + np.arange(length)
        lines.append(np.concatenate((last[: length + run.num_shared], own)))
    return lines


def _bucketed(runs: Sequence[_Run]) -> list[list[int]]:
    """Return indices of runs of similar length, the longest first; a long run is alone, empty ones are in none."""
    lengths = [len(run.tokens) for run in runs]
    longest_first = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i))
    alone = [i for i in longest_first if lengths[i] > _BLOCK]
    others = longest_first[len(alone) :]
    widths = [lengths[i] for i in others]
    parts = best_starts(widths, [0] * len(widths), max_tokens=None, overhead=_BUCKET_TOKENS)
    return [*([i] for i in alone), *(others[start:end] for start, end in parts)]


def padded(rows: Sequence[npt.NDArray[np.signedinteger[Any]]], width: int) -> IndexArray:
    """Return rows of numbers, or of lines of numbers, behind one another, [rows * width, numbers of a line]."""
    numbers = rows[0].shape[1] if rows[0].ndim == 2 else 1
    ids = np.zeros((len(rows), width, numbers), np.int64)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = row.reshape(len(row), numbers)
    return ids.reshape(len(rows) * width, numbers)


def _bucket(before: Sequence[IndexArray], own: IndexArray, device: torch.device | str) -> RunBucket:
    """Return a bucket of B runs by flat indices: of the tokens `before` each, and of its own, [B, T]."""
    lengths, width = [len(each) for each in before], own.shape[1]
    widest = max(lengths)
    read = np.concatenate([padded(before, widest).reshape(len(before), widest), own], 1)
    seen = torch.tensor(lengths[:1] if min(lengths) == widest else lengths, device=device)
    of_others = torch.arange(widest, device=device) < seen[:, None, None, None]
    block = min(width, _BLOCK)
    earlier = (width - 1) // block * block
    of_own = torch.ones(block, earlier + block, dtype=torch.bool, device=device).tril(earlier)
    visible = torch.cat([of_others.expand(-1, 1, block, -1), of_own.expand(len(seen), 1, -1, -1)], 3)
    return RunBucket(read=torch.from_numpy(read).to(device), visible=visible, width=width)


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`SharedLayout.attend` as transformers calls it."""
    layer = LayerAttention.of(sliding_window, softcap, s_aux, module)
    query = at_positions(module, query, rhymerl_shared.position_ids[0])
    return rhymerl_shared.attend(query, key, value, scaling or query.shape[3] ** -0.5, layer), None


AttentionInterface.register(NAME, shared_attention)


@contextmanager
def sharing(models: Iterable[PreTrainedModel]) -> Iterator[None]:
    """Context in which models take `SharedLayout`s; a backward that computes activations again has to be within."""
    configs = []
    for model in models:
        plug_in(model, "rhymerl_paths", BEHIND_PROMPTS)
        configs.append(model.config)
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
    more: dict[str, Any] = {
        "position_ids": layout.position_ids,
        "rhymerl_shared": layout,
        "rhymerl_paths": layout.paths,
    }
    states: Tensor = body(input_ids=layout.input_ids, use_cache=False, **more).last_hidden_state
    return states
