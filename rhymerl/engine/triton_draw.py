"""The draw and its log-probs as Triton kernels, which read each logit once; for a device that Triton knows.

Imported where logits are on such a device only. n = draws, V = vocabulary. A grid of rows times splits of the
vocabulary races in float32, and a second kernel takes the best of a row's splits, scored in float64.

How the token can be the reference's although the race is in float32. S is the score logit / T - log E of a token, s
what the race has for it. u = 2^-24 is the rounding of a float32, and log2 is taken to be wrong by 2^-21 * max(1,
|log2|) at most (CUDA's are better).

- w and 1 - w come from all 64 bits, each within 2.5 u of itself. Below w = 1/4 E is w times a polynomial (0.1 u),
  within 10 u; above it is -log(1 - w) >= 0.287, within 2.5 u / 0.287 + 0.7 * 2^-21 / 0.287 + 2 u. Both are below 2^-19
  of E.
- w >= 2^-65 and 1 - w >= 2^-32, hence |log E| <= 45.1 and it is wrong by less than 2^-19 + 45.1 * (2^-21 + 2 u) <
  2^-15. Tokens with 1 - w < 2^-32, one in 2^32, are not raced: there the reference itself has only some bits of 1 - w,
  and they are scored in float64.
- Logit times 1 / T is wrong by 2.01 u * (|S| + 45.1), and the sum by u * |s|.

Hence |s - S| < 2^-14 + 2^-22 * |S|. Where the best two of a split are more than twice that apart, which is all but
always, the first has won. Otherwise all within `_margin` of the best, which is four times as much, are scored in
float64. So the token is the reference's wherever the best two scores of that differ by more than 2^-51 * (|S| + 64),
the rounding of its own logarithms, sums and products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rhymerl.engine.triton_truncation import find_cutoffs, ranks
from rhymerl.engine.truncation import Truncation

_MOST_SPLITS = tl.constexpr(64)
_PROGRAMS = 2048  # that keep a large device busy
_BLOCK = 512
_NONE = tl.constexpr(2**31 - 1)  # no token
_LOWEST = tl.constexpr(-3.0e38)  # of a lane without finite logits; -inf less -inf would be no number
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


def draw_with_logprobs(
    logits: Tensor,
    counters: Tensor,
    inverse_temperatures: Tensor,
    logprob_scales: Tensor,
    truncation: Truncation | None = None,
    *,
    block: int = _BLOCK,
    most_splits: int = _MOST_SPLITS.value,
) -> tuple[Tensor, Tensor]:
    """Return what `device_draw.draw_with_logprobs` does, [n] int64 and [n] float32, from logits of at most 32 bits.

    Two kernels, three with truncation; nothing waits for the device.
    """
    n, vocabulary = logits.shape
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    block = min(block, max(triton.next_power_of_2(vocabulary), 16))
    splits = max(min(most_splits, -(-vocabulary // (2 * block)), _PROGRAMS // max(n, 1)), 1)
    chunk = -(-vocabulary // (splits * block)) * block
    splits = -(-vocabulary // chunk)
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n == 0:
        return tokens, logprobs
    winners = torch.empty((n, splits), dtype=torch.int32, device=logits.device)
    norms = torch.empty((n, splits, 2), dtype=torch.float32, device=logits.device)
    draws = (counters.contiguous(), inverse_temperatures.contiguous(), logprob_scales.contiguous())
    fast = logits.is_cuda and torch.version.hip is None
    with torch.cuda.device_of(logits):
        cutoffs = temperatures = None
        if truncation is not None:
            temperatures = truncation.temperatures.contiguous()
            cutoffs = find_cutoffs(logits, truncation)
        _race[(n, splits)](
            logits, *draws, temperatures, cutoffs, winners, norms, logits.stride(0), vocabulary, chunk,
            truncates=truncation is not None, fast=fast, block=block, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        _finish[(n,)](
            logits, *draws, winners, norms, tokens, logprobs, logits.stride(0), splits,
            width=_MOST_SPLITS.value, num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _mix32(value):
    """lowbias32, as in engine/noise.py."""
    value = value ^ (value >> 16)
    value = value * 0x7FEB352D
    value = value ^ (value >> 15)
    value = value * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _splitmix64(value):
    """SplitMix64's step on uint64, as in engine/noise.py."""
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _keys(counter):
    """Three uint32 of an int64 counter."""
    state = _splitmix64(counter.to(tl.uint64, bitcast=True))
    return state.to(tl.uint32), (state >> 32).to(tl.uint32), _splitmix64(state).to(tl.uint32)


@triton.jit
def _noise(tokens, k0, k1, k2):
    """The 64 bits of w of each token, as two uint32."""
    high = _mix32(_mix32(tokens.to(tl.uint32) ^ k0) + k1)
    return high, _mix32(high ^ k2)


@triton.jit
def _log2(value, fast: tl.constexpr):
    """Return log2 in float32; `fast` is one NVIDIA instruction for twenty, wrong by <= 2^-22 * max(1, |log2|)."""
    if fast:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [value], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(value)


@triton.jit
def _log_race_times(high, low, fast: tl.constexpr):
    """log E in float32, within 2^-15 where 1 - w >= 2^-32."""
    w = (high.to(tl.float32) + (low.to(tl.float32) + 0.5) * 2.0**-32) * 2.0**-32
    rest = (
        (high ^ 0xFFFFFFFF).to(tl.float32) + ((low ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32
    ) * 2.0**-32  # 1 - w
    # -log(1 - w) / w for w <= 1/4, within 0.1 u: a minimax fit in Chebyshev nodes.
    ratio = w * 0.33524805 + 0.08851621
    ratio = ratio * w + 0.21453486
    ratio = ratio * w + 0.24865359
    ratio = ratio * w + 0.3333919
    ratio = ratio * w + 0.49999905
    ratio = ratio * w + 1.0
    time = tl.where(w < 0.25, w * ratio, _log2(rest, fast) * -_LN_2)
    return _log2(time, fast) * _LN_2


@triton.jit
def _scores_64(logits, scale, high, low):
    """The reference's score, float64, within 2^-52 * (|S| + 64) of exact ones of its w; greedy where the scale is 0."""
    w = high.to(tl.float64) * 2.0**-32 + (low.to(tl.float64) + 0.5) * 2.0**-64
    rest = tl.maximum(1.0 - w, 2.0**-53)
    gone = 1.0 - rest  # w but for what `rest` was rounded by, which the quotient puts right
    small = gone == 0.0
    time = tl.where(small, w, -tl.log(rest) * (w / tl.where(small, 1.0, gone)))
    greedy = logits.to(tl.float64)
    return tl.where(scale > 0.0, greedy * scale - tl.log(time), greedy)


@triton.jit
def _margin(best):
    """Return how far the winner may be below the best float32 score: twice the bound on twice the error (see above)."""
    return 2.0**-12 + 2.0**-20 * tl.abs(best)


@triton.jit
def _raced(
    line,
    tokens,
    end,
    k0,
    k1,
    k2,
    factor,
    weight,
    temperature,
    cutoff,
    last,
    truncates: tl.constexpr,
    fast: tl.constexpr,
):
    """Clean logits, those that truncation leaves (else -inf), float32 scores and noise of some tokens."""
    clean = tl.load(line + tokens, mask=tokens < end, other=float("-inf")).to(tl.float32)
    logits = clean
    if truncates:
        rank = ranks(clean, temperature)
        logits = tl.where((rank > cutoff) | ((rank == cutoff) & (tokens <= last)), clean, float("-inf"))
    high, low = _noise(tokens, k0, k1, k2)
    scores = logits * factor - weight * _log_race_times(high, low, fast)
    return clean, logits, scores, high, low


@triton.jit
def _race(
    logits, counters, inverse_temperatures, logprob_scales, temperatures, cutoffs, winners, norms, stride, vocabulary, chunk,
    truncates: tl.constexpr, fast: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write the best token of a row's split, its largest logit and the sum of exp relative to that.

    The token is _NONE if all are ruled out. Each lane keeps its own best and second best score, and its own running
    sum, so that lanes meet only at the end.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = logits + row * stride
    begin = split * chunk
    end = tl.minimum(begin + chunk, vocabulary)
    k0, k1, k2 = _keys(tl.load(counters + row))
    scale = tl.load(inverse_temperatures + row).to(tl.float64)
    factor = tl.where(scale > 0.0, scale, 1.0).to(tl.float32)
    weight = tl.where(scale > 0.0, 1.0, 0.0).to(tl.float32)
    rate = (tl.load(logprob_scales + row).to(tl.float64) * _LOG2_E).to(tl.float32)
    temperature, cutoff, last = 1.0, 0, 0
    if truncates:
        temperature = tl.load(temperatures + row).to(tl.float32)
        cutoff, last = tl.load(cutoffs + 2 * row), tl.load(cutoffs + 2 * row + 1)

    lanes = tl.arange(0, block)
    best = tl.full((block,), float("-inf"), tl.float32)
    second = tl.full((block,), float("-inf"), tl.float32)
    place = tl.full((block,), _NONE, tl.int32)
    odd = tl.zeros((block,), tl.int32)
    top = tl.full((block,), _LOWEST, tl.float32)
    total = tl.zeros((block,), tl.float32)
    for start in range(begin, end, block):
        tokens = start + lanes
        clean, left, scores, high, low = _raced(
            line, tokens, end, k0, k1, k2, factor, weight, temperature, cutoff, last, truncates, fast
        )
        gap = clean - top
        power = tl.exp2(-tl.abs(gap) * rate)
        total = tl.where(gap > 0.0, total * power + 1.0, total + power)
        top = tl.where(gap > 0.0, clean, top)
        unsure = tl.where(high == 0xFFFFFFFF, weight, 0.0) > 0.0
        odd = tl.where(unsure, 1, odd)
        scores = tl.where(unsure, float("-inf"), scores)
        better = scores > best
        second = tl.where(better, best, tl.maximum(second, scores))
        best = tl.where(better, scores, best)
        place = tl.where(better, tokens, place)

    most = tl.max(best, 0)
    winner = tl.min(tl.where(best == most, place, _NONE), 0)
    # Written so that what is no number counts as near.
    near = most - _margin(most)
    num_near = tl.sum((~(best < near)).to(tl.int32), 0) + tl.sum((~(second < near)).to(tl.int32), 0)
    close = (num_near > 1) & (most > float("-inf"))
    if (scale > 0.0) & (close | (tl.max(odd, 0) > 0)):
        record = tl.full((), float("-inf"), tl.float64)
        winner = tl.full((), _NONE, tl.int32)
        for start in range(begin, end, block):
            tokens = start + lanes
            clean, left, scores, high, low = _raced(
                line, tokens, end, k0, k1, k2, factor, weight, temperature, cutoff, last, truncates, fast
            )
            judged = (left > float("-inf")) & (~(scores < near) | (high == 0xFFFFFFFF))
            if tl.max(judged.to(tl.int32), 0) > 0:
                exact = tl.where(judged, _scores_64(left, scale, high, low), float("-inf"))
                most_here = tl.max(exact, 0)
                first = tl.min(tl.where(exact == most_here, tokens, _NONE), 0)
                winner = tl.where(most_here > record, first, winner)
                record = tl.maximum(record, most_here)

    highest = tl.max(top, 0)
    part = row * tl.num_programs(1) + split
    tl.store(winners + part, winner)
    tl.store(norms + 2 * part, highest)
    tl.store(norms + 2 * part + 1, tl.sum(total * tl.exp2((top - highest) * rate), 0))


@triton.jit(do_not_specialize=["num_splits"])
def _finish(
    logits, counters, inverse_temperatures, logprob_scales, winners, norms, out, logprobs, stride, num_splits,
    width: tl.constexpr,
):  # fmt: skip
    """Write the best token of a row's splits, the smallest of equals, 0 if none may be sampled, and its log-prob."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    k0, k1, k2 = _keys(tl.load(counters + row))
    scale = tl.load(inverse_temperatures + row).to(tl.float64)
    logprob_scale = tl.load(logprob_scales + row).to(tl.float64)
    splits = tl.arange(0, width)
    inside = splits < num_splits
    parts = row * num_splits + splits

    tokens = tl.load(winners + parts, mask=inside, other=_NONE)
    found = tokens != _NONE
    values = tl.load(line + tokens, mask=found, other=float("-inf")).to(tl.float32)
    high, low = _noise(tokens, k0, k1, k2)
    scores = tl.where(found, _scores_64(values, scale, high, low), float("-inf"))
    token = tl.min(tl.where(found & (scores == tl.max(scores, 0)), tokens, _NONE), 0)
    token = tl.where(token == _NONE, 0, token)

    tops = tl.load(norms + 2 * parts, mask=inside, other=_LOWEST)
    sums = tl.load(norms + 2 * parts + 1, mask=inside, other=0.0)
    top = tl.max(tops, 0)
    total = tl.sum(sums.to(tl.float64) * tl.exp((tops - top).to(tl.float64) * logprob_scale), 0)
    chosen = tl.load(line + token).to(tl.float64)
    tl.store(out + row, token.to(tl.int64))
    tl.store(logprobs + row, ((chosen - top.to(tl.float64)) * logprob_scale - tl.log(total)).to(tl.float32))
