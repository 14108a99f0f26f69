"""The GPU's kernels written out in torch, for a CPU that is taken for a GPU (conftest.py)."""

from __future__ import annotations

import torch

from rhymerl.models.attention import last_seen


def attend(
    query, keys, values, tiles, positions, ancestors, kv_slots, scale,
    *, most, splits=1, window=None, softcap=None, sinks=None,
):  # fmt: skip
    """As `triton_attention.attend`."""
    if keys.shape != values.shape:
        raise TypeError("keys and values differ")
    out = torch.full_like(query, float("nan"), dtype=values.dtype)
    groups = query.shape[1] // keys.shape[1]
    for first, count, begin, root, num_keys in tiles.tolist():
        assert count <= most
        slots = kv_slots[begin : begin + num_keys].long()
        k, v = (each[slots].repeat_interleave(groups, 1).to(values.dtype) for each in (keys, values))
        for n in range(first, first + count):
            nodes = torch.arange(num_keys) - root
            visible = nodes + root < min(positions[n] + 1, root)
            visible |= (nodes >= 0) & (ancestors[n] >> nodes.clamp(0, 63) & 1 == 1)
            if window is not None:
                visible = last_seen(visible, window)
            scores = torch.einsum("hd,shd->hs", query[n].to(v.dtype), k) * scale
            scores = scores if softcap is None else softcap * (scores / softcap).tanh()
            scores = scores.masked_fill(~visible, float("-inf"))
            sink = scores[:, :0] if sinks is None else sinks[:, None].to(scores.dtype)
            weights = torch.cat([scores, sink], 1).softmax(-1)[:, :num_keys]
            out[n] = torch.einsum("hs,shd->hd", weights, v)
    return out


def add_rms_norm(hidden, change, weight, epsilon):
    """As `triton_layers.add_rms_norm`."""
    hidden += change
    return normalised(hidden, weight, epsilon).to(change.dtype)


def normalised(numbers, weight, epsilon):
    single = numbers.float()
    return weight * (single * (single.square().mean(-1, keepdim=True) + epsilon).rsqrt()).to(numbers.dtype)


def turn_and_store(query, key, value, cos, sin, slots, keys, values, norms):
    """As `triton_layers.turn_and_store`."""
    if norms is not None:
        query, key = (normalised(heads, weight, norms[2]) for heads, weight in zip((query, key), norms, strict=False))
    half, cos, sin = query.shape[2] // 2, cos[:, None, : query.shape[2] // 2], sin[:, None, : query.shape[2] // 2]
    turned = []
    for heads in (query, key):
        a, b = heads[..., :half], heads[..., half:]
        turned.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(keys.dtype))
    keys[slots], values[slots] = turned[1], value.to(values.dtype)
    return turned[0]


def silu_times(gate, up):
    """As `triton_layers.silu_times`."""
    return gate * gate.sigmoid() * up


STEPS = (add_rms_norm, turn_and_store, silu_times)
