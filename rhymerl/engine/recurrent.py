"""What layers without keys keep of the past: the last inputs of a convolution, the state of a recurrence, by row.

A row's state is written when a chain has been computed, since its tokens are certain. Drafted nodes change no state:
each is computed from its own path, and leaves its small inputs. Those of the accepted nodes advance the state after
verification, so a rejected node has nothing to undo. A state for each node would take far more: one of a gated delta
net is a matrix for each head, and its inputs are a row and a column of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from rhymerl.engine.layout import PassLayout
from rhymerl.engine.paths import PassPaths, PathBlock
from rhymerl.types import BoolArray, IndexArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The accepted nodes of B rows, of at most D each."""

    row: Tensor  # [B]
    path: Tensor  # [B, D] nodes of the pass from the first to the last, then anything
    count: Tensor  # [B] of them

    @classmethod
    def of(cls, row: IndexArray, depth: IndexArray, node: IndexArray, device: torch.device) -> Accepted:
        """Return them from the row and the depth (from 1) of each node."""
        rows, place = np.unique(row, return_inverse=True)
        path = np.zeros((len(rows), int(depth.max())), np.int64)
        path[place, depth - 1] = node
        there = [torch.from_numpy(each).to(device) for each in (rows, path, np.bincount(place))]
        return cls(row=there[0], path=there[1], count=there[2])


class ConvStates:
    """The inputs of a causal convolution's last `width` - 1 tokens, [rows + 1, width - 1, C]; none are zeros."""

    def __init__(self, num_rows: int, width: int, like: Tensor) -> None:
        self._width = width
        self._inputs = like.new_zeros(num_rows + 1, width - 1, like.shape[-1])  # the last row is of nobody
        self._drafted = like[:0]

    def windows(self, paths: PassPaths, inputs: Tensor) -> Tensor:
        """Return the inputs that each token's convolution takes, [N, width, C], from those of the pass, [N, C]."""
        known = torch.cat([self._inputs[paths.source].flatten(0, 1), inputs])
        windows = known[paths.windows(self._width)]
        self._inputs[paths.row] = windows[paths.last, 1:]
        if paths.nodes is not None:
            self._drafted = inputs[paths.nodes]
        return windows

    def accept(self, accepted: Accepted) -> None:
        """The nodes have become tokens of their rows."""
        known = torch.cat([self._inputs[accepted.row], self._drafted[accepted.path]], 1)
        last = accepted.count[:, None] + torch.arange(self._width - 1, device=known.device)
        self._inputs[accepted.row] = known.take_along_dim(last[..., None], 1)


class Terms(NamedTuple):
    """What a rule gets of tokens. H heads; the state of a head is a matrix [dim of keys, dim of values]."""

    query: Tensor  # [..., H, dim]
    key: Tensor  # [..., H, dim]
    value: Tensor  # [..., H, dim]
    decay: Tensor  # [..., H] logarithms, at most 0
    beta: Tensor | None  # [..., H] None: values are added as they are, else by the delta rule

    def at(self, tokens: Tensor) -> Terms:
        """Return those of tokens [B, T], as [B, H, T, ...]."""
        query, key, value, decay = (each[tokens].transpose(1, 2) for each in self[:4])
        return Terms(query, key, value, decay, None if self.beta is None else self.beta[tokens].transpose(1, 2))


class Advanced(NamedTuple):
    """What a rule finds, for T tokens of B rows."""

    output: Tensor  # [B, H, T, dim of values]
    key: Tensor  # [B, H, T, dim of keys]
    added: Tensor  # [B, H, T, dim of values] what stands in the state at each key
    total: Tensor  # [B, H, T] the decay since the state
    state: Tensor  # [B, H, dim of keys, dim of values] after the last token


class RuleStates:
    """The states of a recurrence S = exp(decay) S + key added^T, out = S^T query, [rows + 1, H, dim, dim].

    `added` is the value, or by the gated delta rule (arXiv 2412.06464) beta (value - S^T key) of the decayed S.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._states: Tensor | None = None
        self._drafted: list[Tensor] = []  # key, added and total, [K, H, ...]

    def run(self, paths: PassPaths, terms: Terms) -> Tensor:
        """Return [N, H, dim of values]."""
        key, value = terms.key, terms.value
        if self._states is None:
            self._states = key.new_zeros(self._num_rows + 1, *key.shape[1:], value.shape[2])
        output = torch.empty_like(value)
        for block in paths.chains:
            found = self._advance(block, terms, output)
            self._states[block.row] = found.state
        if paths.trees is not None:
            found, real = self._advance(paths.trees, terms, output), paths.trees.real
            self._drafted = [each.transpose(1, 2)[real] for each in (found.key, found.added, found.total)]
        return output

    def _advance(self, block: PathBlock, terms: Terms, output: Tensor) -> Advanced:
        assert self._states is not None
        found = advance(terms.at(block.tokens), self._states[block.source], block.sees, block.real)
        output[block.tokens[block.real]] = found.output.transpose(1, 2)[block.real]
        return found

    def accept(self, accepted: Accepted) -> None:
        """The nodes have become tokens of their rows."""
        assert self._states is not None
        key, added, total = (each[accepted.path] for each in self._drafted)
        behind = torch.arange(total.shape[1], device=total.device) >= accepted.count[:, None]
        end = total.take_along_dim(accepted.count[:, None, None] - 1, 1)
        share = (end - total).masked_fill(behind[..., None], float("-inf")).exp()
        grown = torch.einsum("bdh,bdhk,bdhv->bhkv", share, key, added)
        self._states[accepted.row] = end.transpose(1, 2)[..., None].exp() * self._states[accepted.row] + grown


def advance(terms: Terms, state: Tensor, sees: Tensor, real: Tensor) -> Advanced:
    """Run a rule over paths of T tokens at once, chains or trees: terms [B, H, T, ...], states [B, H, dim, dim].

    The steps of a path are a triangular system, as in the chunks of arXiv 2406.06484, whose matrix has entries only
    where a token `sees` another, [B or 1, T, T]. Tokens that are not `real`, [B, T], leave the state as it is.
    """
    key, decay = terms.key * real[:, None, :, None], terms.decay * real[:, None]
    total = (sees[:, None].to(decay.dtype) @ decay[..., None])[..., 0]
    share = (total[..., :, None] - total[..., None, :]).masked_fill(~sees[:, None], float("-inf")).exp()
    kept, added = total.exp()[..., None], terms.value
    if terms.beta is not None:
        beta = terms.beta[..., None]
        added = beta * (terms.value - kept * (key @ state))
        system = beta * share * (key @ key.transpose(2, 3))
        added = torch.linalg.solve_triangular(system, added, upper=False, unitriangular=True)
    output = kept * (terms.query @ state) + (share * (terms.query @ key.transpose(2, 3))) @ added
    grown = (key * share[..., -1, :, None]).transpose(2, 3) @ added
    return Advanced(output, key, added, total, kept[..., -1:, :] * state + grown)


class RowStates:
    """The states of all layers by row, allocated by the first pass. `accept` is told what became of a pass's drafts."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._layout: PassLayout | None = None
        self._paths: PassPaths | None = None
        self._convs: dict[tuple[int, int], ConvStates] = {}
        self._rules: dict[tuple[int, int], RuleStates] = {}
        self._current: RuleStates | None = None

    def begin(self, layout: PassLayout) -> None:
        """A pass begins."""
        self._layout, self._paths = layout, None

    def _paths_on(self, device: torch.device) -> PassPaths:
        if self._paths is None:
            assert self._layout is not None
            self._paths = PassPaths(self._layout, device)
        return self._paths

    def windows(self, layer: tuple[int, int], inputs: Tensor, width: int) -> Tensor:
        """Return what a convolution takes, [1, C, N, width], from the pass's inputs, [1, C, N]."""
        tokens = inputs[0].T
        if layer not in self._convs:
            self._convs[layer] = ConvStates(self._num_rows, width, tokens)
        return self._convs[layer].windows(self._paths_on(inputs.device), tokens).permute(2, 0, 1)[None]

    def enter(self, layer: tuple[int, int]) -> None:
        """The pass has come to a layer with a rule, which will `run`."""
        self._current = self._rules.setdefault(layer, RuleStates(self._num_rows))

    def run(self, terms: Terms) -> Tensor:
        """Return what the layer's rule finds, [N, H, dim of values]."""
        assert self._current is not None
        return self._current.run(self._paths_on(terms.key.device), terms)

    def accept(self, sampled_at: BoolArray) -> None:
        """The nodes of the pass at whose logits [M] tokens were sampled are part of their rows now."""
        if self._paths is None or self._layout is None:
            return
        layout, node = self._layout, np.flatnonzero(sampled_at[self._layout.logit_level > 0])
        if not len(node):
            return
        row = layout.emitting[layout.drafts.requests[node]]
        accepted = Accepted.of(row, layout.node_depth[node], node, self._paths.row.device)
        for conv in self._convs.values():
            conv.accept(accepted)
        for rule in self._rules.values():
            rule.accept(accepted)


# -- what the layers of transformers call --------------------------------------------------------------------------


def _convolve(
    windows: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: object
) -> Tensor:
    """The convolution over `RowStates.windows`: [1, C, N, width] -> [1, C, N]."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    out = (windows.to(wide) * weight[:, None].to(wide)).sum(-1)
    out = (out if bias is None else out + bias[:, None]).to(weight.dtype)
    return (out if activation is None else ACT2FN[activation](out)).to(windows.dtype)


def _gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    rhymerl_states: RowStates,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """The rule over the states of the layer that calls it: [1, N, heads, dim] -> [1, N, heads, dim of values]."""
    groups, wide = value.shape[2] // key.shape[2], torch.promote_types(value.dtype, torch.float32)
    with torch.autocast(value.device.type, enabled=False):
        q, k = (each[0].to(wide).repeat_interleave(groups, 1) for each in (query, key))
        if use_qk_l2norm_in_kernel:
            q, k = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (q, k))
        terms = Terms(q * q.shape[-1] ** -0.5, k, *(each[0].to(wide) for each in (value, g, beta)))
        out = rhymerl_states.run(terms)
    return out[None].to(query.dtype), out[:0]


def _mamba2_scan(
    hidden_states: Tensor,
    dt: Tensor,
    rate: Tensor,
    key: Tensor,
    query: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    rhymerl_states: RowStates,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """The scan over the states of the layer that calls it: [1, N, heads, dim] -> [1, N, heads, dim]."""
    groups, wide = hidden_states.shape[2] // key.shape[2], torch.promote_types(hidden_states.dtype, torch.float32)
    with torch.autocast(dt.device.type, enabled=False):
        step = F.softplus(dt[0] + dt_bias.to(dt.dtype)).clamp(*dt_limit).to(wide)
        x, (k, q) = hidden_states[0].to(wide), (each[0].to(wide).repeat_interleave(groups, 1) for each in (key, query))
        terms = Terms(q, k, x * step[..., None], rate.to(wide) * step, None)
        out = rhymerl_states.run(terms) + D[:, None] * x
    return out[None], out[:0]


BY_ROWS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
}
