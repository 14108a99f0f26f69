"""Top-k, top-p and min-p as a Triton kernel that finds where each row is cut off, without sorting it.

What `truncation.truncate` keeps of a row is a prefix of its tokens in the order of (logit / T descending, id
ascending), since each rule keeps a prefix of what is left. So the place of the last kept token says all. It is searched
by quarters of an interval of ranks, which are the 32 bits of logit / T made to order like integers, with the number and
the probability of the tokens above three ranks in each pass, and it ends early where a single token is left between.

A row with truncation is read once for its maximum, at most 16 times for top-k, as often for top-p, and once more to
tell equal logits apart: 34 times at most, some ten where few are equal. A row without truncation is not read at all.
Sums are in float32 for each of `_BLOCK` lanes and in float64 across them, in an order that depends on V alone. So a
cumulated probability is within (V / _BLOCK + 64) * 2^-24 of exact, 6e-6 at V = 151 936, and where top-p is further from
that than this the cut is that of exact sums. min-p is compared with exp within 2^-22 * (|logit / T| + 1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rhymerl.engine.truncation import Truncation

_BLOCK = 4096
_EVERYTHING = tl.constexpr(-(2**31))  # a rank below that of -inf
_ALL = tl.constexpr(2**31 - 1)  # equals, or tokens
_LOWEST = tl.constexpr(-3.0e38)
_LOG2_E = tl.constexpr(1.4426950408889634)


def find_cutoffs(logits: Tensor, truncation: Truncation, *, block: int = _BLOCK) -> Tensor:
    """Return [n, 2] int32: the cutoff rank of each row of logits [n, V], and the last id kept at that rank.

    Logits that rank above the first number are kept, and equal ones up to the second as id.
    """
    n, vocabulary = logits.shape
    cutoffs = torch.empty((n, 2), dtype=torch.int32, device=logits.device)
    rules = (truncation.temperatures, truncation.top_k, truncation.top_p, truncation.min_p)
    block = min(block, max(triton.next_power_of_2(vocabulary), 16))
    _cut[(n,)](
        logits, *(rule.contiguous() for rule in rules), cutoffs, logits.stride(0), vocabulary,
        block=block, num_warps=16 if block == _BLOCK else 4, enable_fp_fusion=True,
    )  # fmt: skip
    return cutoffs


@triton.jit
def _ranks_of(values):
    """int32 in the order of float32; +0 and -0 are equal."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ranks(logits, temperature):
    """Return int32 in the order of logits / temperature, which is divided as torch does."""
    return _ranks_of(tl.div_rn(logits, temperature + tl.zeros_like(logits)))


@triton.jit
def _quotients(line, tokens, vocabulary, temperature):
    """Return logit / T, -inf behind the row's end."""
    logits = tl.load(line + tokens, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logits, temperature + tl.zeros_like(logits))


@triton.jit
def _survey(line, vocabulary, temperature, block: tl.constexpr):
    """Return the largest logit / T, the lowest rank above that of -inf, the number of such tokens, and their mass.

    Mass is the sum of exp(.. - largest).
    """
    top = tl.full((block,), _LOWEST, tl.float32)
    total = tl.zeros((block,), tl.float32)
    least = tl.full((block,), _ALL, tl.int32)
    number = tl.zeros((block,), tl.int32)
    for start in range(0, vocabulary, block):
        values = _quotients(line, start + tl.arange(0, block), vocabulary, temperature)
        gap = values - top
        power = tl.exp2(-tl.abs(gap) * _LOG2_E)
        total = tl.where(gap > 0.0, total * power + 1.0, total + power)
        top = tl.where(gap > 0.0, values, top)
        counts = values > float("-inf")
        least = tl.where(counts, tl.minimum(least, _ranks_of(values)), least)
        number += counts.to(tl.int32)
    most = tl.max(top, 0)
    mass = tl.sum((total * tl.exp2((top - most) * _LOG2_E)).to(tl.float64), 0)
    return most, tl.min(least, 0), tl.sum(number, 0), mass


@triton.jit
def _above(line, vocabulary, temperature, top, first, second, third, block: tl.constexpr):
    """The number and mass of tokens whose rank is at least the first, second and third."""
    n1, n2, n3 = tl.zeros((block,), tl.int32), tl.zeros((block,), tl.int32), tl.zeros((block,), tl.int32)
    m1, m2, m3 = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)
    for start in range(0, vocabulary, block):
        values = _quotients(line, start + tl.arange(0, block), vocabulary, temperature)
        power, rank = tl.exp2((values - top) * _LOG2_E), _ranks_of(values)
        n1, m1 = n1 + (rank >= first).to(tl.int32), m1 + tl.where(rank >= first, power, 0.0)
        n2, m2 = n2 + (rank >= second).to(tl.int32), m2 + tl.where(rank >= second, power, 0.0)
        n3, m3 = n3 + (rank >= third).to(tl.int32), m3 + tl.where(rank >= third, power, 0.0)
    masses = tl.sum(m1.to(tl.float64), 0), tl.sum(m2.to(tl.float64), 0), tl.sum(m3.to(tl.float64), 0)
    return tl.sum(n1, 0), tl.sum(n2, 0), tl.sum(n3, 0), masses[0], masses[1], masses[2]


@triton.jit
def _search(
    line, vocabulary, temperature, top, low, high, num_low, mass_low, target, by_mass: tl.constexpr, block: tl.constexpr
):
    """Find the largest rank in [low, high) at or above which number or mass of tokens reaches the target.

    No token has rank `high` or more. Returns it, and number and mass of what is at least that and of what is more. Any
    rank between two tokens is as good as the next.
    """
    num_high, mass_high = num_low * 0, mass_low * 0.0
    while (high - low > 1) & (num_low - num_high > 1):
        width = high - low
        first, second, third = low + width // 4, low + width // 2, low + (width * 3) // 4
        n1, n2, n3, m1, m2, m3 = _above(line, vocabulary, temperature, top, first, second, third, block)
        if by_mass:
            enough1, enough2, enough3 = m1 >= target, m2 >= target, m3 >= target
        else:
            enough1, enough2, enough3 = n1 >= target, n2 >= target, n3 >= target
        enough1 = enough1 | (first == low)  # known, and sums are rounded
        low = tl.where(enough3, third, tl.where(enough2, second, tl.where(enough1, first, low)))
        num_low = tl.where(enough3, n3, tl.where(enough2, n2, tl.where(enough1, n1, num_low)))
        mass_low = tl.where(enough3, m3, tl.where(enough2, m2, tl.where(enough1, m1, mass_low)))
        high = tl.where(enough1, tl.where(enough2, tl.where(enough3, high, third), second), first)
        num_high = tl.where(enough1, tl.where(enough2, tl.where(enough3, num_high, n3), n2), n1)
        mass_high = tl.where(enough1, tl.where(enough2, tl.where(enough3, mass_high, m3), m2), m1)
    return low, num_low, mass_low, num_high, mass_high


@triton.jit
def _id_of_equal(line, vocabulary, temperature, cut, number, block: tl.constexpr):
    """The id of the number-th token, counted from 1, whose rank is `cut`."""
    seen = number * 0
    found = tl.full((), _ALL, tl.int32)
    for start in range(0, vocabulary, block):
        tokens = start + tl.arange(0, block)
        equal = _ranks_of(_quotients(line, tokens, vocabulary, temperature)) == cut
        equal = (equal & (tokens < vocabulary)).to(tl.int32)
        place = tl.cumsum(equal, 0) + seen
        found = tl.minimum(found, tl.min(tl.where((equal > 0) & (place == number), tokens, _ALL), 0))
        seen += tl.sum(equal, 0)
    return found


@triton.jit
def _cut(logits, temperatures, top_ks, top_ps, min_ps, cutoffs, stride, vocabulary, block: tl.constexpr):
    """Write the last rank of a row that is kept, and the last id among equals of that rank."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    temperature = tl.load(temperatures + row).to(tl.float32)
    top_k = tl.load(top_ks + row).to(tl.int64)
    top_p = tl.load(top_ps + row).to(tl.float32)
    min_p = tl.load(min_ps + row).to(tl.float32)
    cut = tl.full((), _EVERYTHING, tl.int64)
    last = tl.full((), _ALL, tl.int32)
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        top, least, number, mass = _survey(line, vocabulary, temperature, block)
        most = _ranks_of(top).to(tl.int64)
        low, num_low, mass_low, num_high, mass_high = least.to(tl.int64), number, mass, number * 0, mass * 0.0
        equals = tl.full((), _ALL, tl.int32)  # how many of the last rank are kept
        single = (top_k == 1) | (top_p <= 0.0) | (min_p > 1.0)
        if number > 0:
            cut = low
            if single:
                cut, equals = most, equals * 0 + 1
            else:
                allowed = mass
                if (top_k > 0) & (top_k < number):
                    low, num_low, mass_low, num_high, mass_high = _search(
                        line, vocabulary, temperature, top, low, most + 1, num_low, mass_low, top_k, False, block
                    )
                    cut, equals = low, (top_k - num_high).to(tl.int32)
                    share = equals.to(tl.float64) / tl.maximum(num_low - num_high, 1).to(tl.float64)
                    allowed = mass_high + (mass_low - mass_high) * tl.minimum(share, 1.0)
                    equals = tl.where(equals < num_low - num_high, equals, _ALL)
                if top_p < 1.0:
                    target = allowed * top_p.to(tl.float64)
                    low, num_low, mass_low, num_high, mass_high = _search(
                        line, vocabulary, temperature, top, low, most + 1, num_low, mass_low, target, True, block
                    )
                    each = (mass_low - mass_high) / tl.maximum(num_low - num_high, 1).to(tl.float64)
                    wanted = tl.ceil((target - mass_high) / tl.maximum(each, 1e-30))
                    wanted = tl.minimum(tl.maximum(wanted, 1.0), 2.0e9).to(tl.int32)
                    wanted = tl.where(wanted < num_low - num_high, wanted, _ALL)
                    equals = tl.where(low == cut, tl.minimum(equals, wanted), wanted)
                    cut = low
                if min_p > 0.0:
                    bound = tl.minimum(_ranks_of(top + tl.log(min_p)).to(tl.int64), most)
                    equals = tl.where(bound > cut, _ALL, equals)
                    cut = tl.maximum(bound, cut)
            if equals != _ALL:
                last = _id_of_equal(line, vocabulary, temperature, cut, equals, block)
    tl.store(cutoffs + 2 * row, cut.to(tl.int32))
    tl.store(cutoffs + 2 * row + 1, last)
