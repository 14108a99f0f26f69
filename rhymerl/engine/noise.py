"""Position-keyed noise: a counter hash of (request seed, position, token id), the same on every device.

Two 32-bit hashes give a uniform w in (0, 1) with 64 bits; the race time is E = -log(1 - w), and the draw is the token
with the largest logit / T - log E (Gumbel-max: -log E is Gumbel noise). Small w wins, and small w keeps
its full relative precision, so the tail of the distribution is not cut off by rounding. The noise is a
function of the three numbers alone, hence a request's tokens depend on weights, request and seed only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymerl.compiled import compiled

_MASK32 = 0xFFFFFFFF
KeyArray = npt.NDArray[np.uint32]


def noise_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> KeyArray:
    """Return three 32-bit keys a draw, [n, 3], from seeds and response positions [n] (SplitMix64's finaliser)."""
    return keys_at(noise_counters(seeds), positions)


def noise_counters(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the numbers, [n], to which a response position is added before hashing; an engine needs only these."""
    counters = np.empty(len(seeds), np.uint64)
    _hash(seeds, counters)
    return counters


def keys_at(counters: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> KeyArray:
    """Return the keys of `noise_keys`, [n, 3], of requests with these counters at these positions, each [n]."""
    keys = np.empty((len(counters), 3), np.uint32)
    _fill_keys(counters, positions, keys)
    return keys


@compiled
def _splitmix64(value: np.uint64) -> np.uint64:
    value = np.uint64(value + np.uint64(0x9E3779B97F4A7C15))
    value = np.uint64((value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    value = np.uint64((value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint64(value ^ (value >> np.uint64(31)))


@compiled
def _hash(values: npt.NDArray[np.uint64], out: npt.NDArray[np.uint64]) -> None:
    for i in range(len(values)):
        out[i] = _splitmix64(values[i])


@compiled
def _fill_keys(counters: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], keys: KeyArray) -> None:
    low = np.uint64(0xFFFFFFFF)
    for i in range(len(counters)):
        state = _splitmix64(np.uint64(counters[i] + np.uint64(positions[i])))
        keys[i, 0] = np.uint32(state & low)
        keys[i, 1] = np.uint32(state >> np.uint64(32))
        keys[i, 2] = np.uint32(_splitmix64(state) & low)


def noise_keys_on_device(counters: Tensor) -> Tensor:
    """Return the keys of `noise_keys`, [n, 3] int64, from counters plus positions [n] int64 (signed, same bits)."""
    state = _splitmix64_tensor(counters)
    more = _splitmix64_tensor(state)
    return torch.stack([state & _MASK32, (state >> 32) & _MASK32, more & _MASK32], -1)


def _splitmix64_tensor(value: Tensor) -> Tensor:
    """Compute splitmix64 on int64, whose products and sums wrap like uint64's.

    `>>` copies the sign, so that is masked out.
    """
    value = value - 0x61C8864680B583EB
    value = (value ^ ((value >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    value = (value ^ ((value >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
    return value ^ ((value >> 31) & (2**33 - 1))


def _mix32(value: Tensor) -> Tensor:
    """A bijective 32-bit mixer (Wellons' lowbias32) on int64 tensors."""
    value = value ^ (value >> 16)
    value = (value * 0x7FEB352D) & _MASK32
    value = value ^ (value >> 15)
    value = (value * 0x846CA68B) & _MASK32
    return value ^ (value >> 16)


def log_race_times(keys: Tensor, vocabulary: int) -> Tensor:
    """Return log E of every token, [n, vocabulary] float64, from keys [n, 3] int64; the compiled draw's reference."""
    tokens = torch.arange(vocabulary, device=keys.device)
    high = _mix32((_mix32(tokens ^ keys[:, :1]) + keys[:, 1:2]) & _MASK32)
    low = _mix32(high ^ keys[:, 2:])
    w = (high.double() * 2.0**-32 + (low.double() + 0.5) * 2.0**-64).clamp_(max=1 - 2.0**-53)
    return torch.log(-torch.log1p(-w))
