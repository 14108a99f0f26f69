"""The draw: the race of engine/noise.py, compiled for the CPU at about a nanosecond a token, and in torch for any device.

On the CPU a token can only win when w < p / p_best-so-far, and both a bound of that ratio and the leading 32 bits of w
are cheap, so the logarithms are taken for a handful of tokens a row and the answer is still exact.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymerl.compiled import compiled
from rhymerl.engine.noise import KeyArray, log_race_times

_AT_ONCE = 2**24  # logits; without a compiler each of them needs some 40 bytes


def draw_on_device(logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
    """What `draw_tokens` draws, [n] int64, from logits [n, vocabulary], inverse temperatures [n] and keys [n, 3] int64.

    On an accelerator one compiled kernel reads the logits once.
    """
    race = torch.compile(_race, dynamic=True) if logits.is_cuda else _race
    rows = max(_AT_ONCE // logits.shape[-1], 1)
    scales = inverse_temperatures.double()
    parts = zip(logits.split(rows), scales.split(rows), keys.split(rows), strict=True)
    return torch.cat([race(*part) for part in parts])


def _race(logits: Tensor, scales: Tensor, keys: Tensor) -> Tensor:
    scale = scales[:, None]
    scores = logits.double() * torch.where(scale > 0, scale, 1.0)
    scores = scores - torch.where(scale > 0, log_race_times(keys, logits.shape[-1]), 0.0)
    return scores.argmax(-1)


@compiled
def draw_tokens(
    logits: npt.NDArray[np.floating],
    rows: npt.NDArray[np.int64],
    inverse_temperatures: npt.NDArray[np.float64],
    keys: KeyArray,
    out: npt.NDArray[np.int32],
) -> None:
    """out[i] = the token drawn from row rows[i] of logits [*, vocabulary] with keys[i]; an inverse temperature of 0 is greedy.

    -inf marks tokens that may not be drawn; ties go to the smallest id.
    """

    def mix(x: np.uint32) -> np.uint32:
        x = np.uint32(x ^ (x >> np.uint32(16)))
        x = np.uint32(x * np.uint32(0x7FEB352D))
        x = np.uint32(x ^ (x >> np.uint32(15)))
        x = np.uint32(x * np.uint32(0x846CA68B))
        return np.uint32(x ^ (x >> np.uint32(16)))

    def log_race_time(first: np.uint32, second: np.uint32) -> float:
        w = float(first) * 2.0**-32 + (float(second) + 0.5) * 2.0**-64
        return math.log(-math.log1p(-min(w, 1 - 2.0**-53)))

    block, log2e = 512, 1.4426950408889634
    exponent = np.empty(block, np.int32)
    bound = exponent.view(np.float32)
    first = np.empty(block, np.uint32)
    vocabulary = logits.shape[1]
    for i in range(len(rows)):
        line = logits[rows[i]]
        top = 0
        for v in range(1, vocabulary):
            if line[v] > line[top]:
                top = v
        scale = inverse_temperatures[i]
        out[i] = top
        if scale == 0.0:
            continue
        k0, k1, k2 = keys[i, 0], keys[i, 1], keys[i, 2]
        # The most likely token races first: it is nearly always close to the winner.
        leading = mix(np.uint32(mix(np.uint32(top) ^ k0) + k1))
        best = -log_race_time(leading, mix(leading ^ k2))  # relative to the largest logit
        largest = np.float32(line[top])
        for begin in range(0, vocabulary, block):
            count = min(block, vocabulary - begin)
            # 2^y <= 2^floor(y) * (1 + frac(y)), and the right side is what y's bits mean as a float32.
            offset = np.float32(127.01 - best * log2e)
            step = np.float32(scale * log2e)
            hits = 0
            for j in range(count):
                first[j] = mix(np.uint32(mix(np.uint32(begin + j) ^ k0) + k1))
                y = (np.float32(line[begin + j]) - largest) * step + offset
                exponent[j] = np.int32(min(max(y, np.float32(1.0)), np.float32(160.0)) * np.float32(8388608.0))
            for j in range(count):
                hits += np.float32(first[j]) * np.float32(2.3283064e-10) <= bound[j]
            if hits == 0:
                continue
            for j in range(count):
                if np.float32(first[j]) * np.float32(2.3283064e-10) > bound[j]:
                    continue
                score = (float(line[begin + j]) - float(line[top])) * scale
                score -= log_race_time(first[j], mix(first[j] ^ k2))
                if score > best or (score == best and begin + j < out[i]):
                    best = score
                    out[i] = begin + j
