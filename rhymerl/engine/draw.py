"""The draw on the CPU: engine/noise.py's race, compiled, at about 1 ns a token, and log-probs of sampled tokens.

engine/device_draw.py has it for other devices. A token can only win when w < p / p_best-so-far, and both a bound of
that ratio and the leading 32 bits of w are cheap, so the logarithms are taken for a handful of tokens a row and the
answer is still exact.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rhymerl.compiled import compiled
from rhymerl.engine.noise import KeyArray


@compiled
def draw_tokens(
    logits: npt.NDArray[np.floating],
    rows: npt.NDArray[np.int64],
    inverse_temperatures: npt.NDArray[np.float64],
    keys: KeyArray,
    out: npt.NDArray[np.int32],
) -> None:
    """Write out[i] = the token sampled from row rows[i] of logits [*, vocabulary] with keys[i].

    An inverse temperature of 0 is greedy. -inf marks tokens that may not be sampled; ties go to the smallest id.
    """

    def mix(x: np.uint32) -> np.uint32:
        x = np.uint32(x ^ (x >> np.uint32(16)))
        x = np.uint32(x * np.uint32(0x7FEB352D))
        x = np.uint32(x ^ (x >> np.uint32(15)))
        x = np.uint32(x * np.uint32(0x846CA68B))
        return np.uint32(x ^ (x >> np.uint32(16)))

    def log_race_time(first: np.uint32, second: np.uint32) -> float:
        w = np.float64(first) * 2.0**-32 + (np.float64(second) + 0.5) * 2.0**-64
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
        largest = line[top]
        for begin in range(0, vocabulary, block):
            count = min(block, vocabulary - begin)
            # 2^y <= 2^floor(y) * (1 + frac(y)), and the right side is what y's bits mean as a float32.
            offset = np.float32(127.01 - best * log2e)
            step = np.float32(scale * log2e)
            hits = 0
            for j in range(count):
                first[j] = mix(np.uint32(mix(np.uint32(begin + j) ^ k0) + k1))
                y = np.float32(line[begin + j] - largest) * step + offset
                exponent[j] = np.int32(min(max(y, np.float32(1.0)), np.float32(160.0)) * np.float32(8388608.0))
            for j in range(count):
                hits += np.float32(first[j]) * np.float32(2.3283064e-10) <= bound[j]
            if hits == 0:
                continue
            for j in range(count):
                if np.float32(first[j]) * np.float32(2.3283064e-10) > bound[j]:
                    continue
                score = (np.float64(line[begin + j]) - np.float64(line[top])) * scale
                score -= log_race_time(first[j], mix(first[j] ^ k2))
                if score > best or (score == best and begin + j < out[i]):
                    best = score
                    out[i] = begin + j


@compiled
def chosen_logprobs(
    logits: npt.NDArray[np.floating],
    rows: npt.NDArray[np.int64],
    inverse_temperatures: npt.NDArray[np.float64],
    tokens: npt.NDArray[np.int32],
    out: npt.NDArray[np.float64],
) -> None:
    """Write out[i] = log_softmax(logits[rows[i]] * inverse_temperatures[i])[tokens[i]] in nats, or NaN."""
    block = 512
    term, exponent = np.empty(block, np.float32), np.empty(block, np.int32)
    power = exponent.view(np.float32)
    vocabulary = logits.shape[1]
    for i in range(len(rows)):
        line, scale = logits[rows[i]], inverse_temperatures[i]
        top = line[0]
        for v in range(1, vocabulary):
            top = max(top, line[v])
        total = 0.0
        if logits.itemsize == 8:
            for v in range(vocabulary):
                total += math.exp((line[v] - top) * scale)
        else:
            # Vectorised, to a float32's precision: 2^y = 2^whole * 2^part, from bits and a polynomial.
            binary = np.float32(scale * 1.4426950408889634)
            rest = np.float32(
                scale * 1.4426950408889634 - binary
            )  # a rounded factor would shift all terms the same way
            for begin in range(0, vocabulary, block):
                count = min(block, vocabulary - begin)
                for j in range(count):
                    y = (line[begin + j] - top) * binary + (line[begin + j] - top) * rest
                    if y < np.float32(-126.0):
                        y = np.float32(-126.0)
                    whole = np.int32(y - np.float32(0.5))
                    part = y - np.float32(whole)
                    exponent[j] = (whole + np.int32(127)) << np.int32(23)
                    tail = (np.float32(1.5353362e-4) * part + np.float32(1.3398874e-3)) * part + np.float32(
                        9.6184374e-3
                    )
                    tail = (tail * part + np.float32(5.5503325e-2)) * part + np.float32(2.4022648e-1)
                    term[j] = (tail * part + np.float32(6.9314720e-1)) * part + np.float32(1.0)
                for j in range(count):
                    total += np.float64(term[j] * power[j])
        out[i] = (np.float64(line[tokens[i]]) - np.float64(top)) * scale - math.log(total)
