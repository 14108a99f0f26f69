"""The kernels of the draw under Triton's interpreter, against the race in float64 and what a sort keeps."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rhymerl.engine.device_draw import draw_with_logprobs
from rhymerl.engine.noise import log_race_times, noise_keys_on_device
from rhymerl.engine.truncation import Truncation
from tests.engine.interpreted import Interpreter
from tests.products import values_first

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@pytest.fixture(scope="module")
def kernel():
    with Interpreter("rhymerl.engine.triton_draw:draw_with_logprobs") as interpreter:
        yield interpreter


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Arguments of a draw."""

    logits: torch.Tensor
    counters: torch.Tensor
    inverse: torch.Tensor
    scales: torch.Tensor
    truncation: Truncation | None = None

    def tuple(self):
        return self.logits, self.counters, self.inverse, self.scales, self.truncation


def make(n, vocabulary, *, seed=0, spread=4.0, rules=(), dtype=torch.float32, gaps=0.1):
    """Return random draws, T = 0.3 to 2, a fifth greedy, some logits -inf; a fourth of the rows is not truncated."""
    source = np.random.default_rng(seed)
    logits = torch.from_numpy(source.normal(size=(n, vocabulary)) * spread).to(dtype)
    logits[torch.from_numpy(source.random(logits.shape) < gaps)] = float("-inf")
    logits[:, vocabulary // 2] = 1.0
    temperature = torch.from_numpy(source.uniform(0.3, 2.0, n))
    inverse = torch.where(torch.from_numpy(source.random(n) < 0.2), 0.0, 1 / temperature)
    on = source.random(n) < 0.75
    sizes = np.minimum(np.exp(source.uniform(0, np.log(vocabulary + 1), n)).astype(np.int64), vocabulary + 1)
    truncation = Truncation(
        temperatures=temperature.float(),
        top_k=torch.from_numpy(np.where(on & ("top_k" in rules), sizes, 0)),
        top_p=torch.from_numpy(np.where(on & ("top_p" in rules), source.uniform(0.01, 1, n), 1.0)).float(),
        min_p=torch.from_numpy(np.where(on & ("min_p" in rules), source.uniform(0, 0.5, n) ** 3, 0.0)).float(),
    )
    counters = torch.from_numpy(source.integers(-(2**63), 2**63 - 1, n))
    return Draws(
        logits=logits,
        counters=counters,
        inverse=inverse,
        scales=1 / temperature,
        truncation=truncation if rules else None,
    )


def kept(logits, temperature, top_k, top_p, min_p):
    """Return a mask of what a float64 sort of a line keeps, and whether a rule is closer than the kernel's sums."""
    quotients = logits.float().numpy() / np.float32(temperature)
    order = np.argsort(-quotients, kind="stable")
    weights = np.exp(quotients[order].astype(np.float64) - quotients.max())
    keep = np.arange(len(order)) < (top_k or len(order))
    shares = np.where(keep, weights, 0) / weights[keep].sum()
    before = shares.cumsum() - shares
    close = bool(top_p < 1 and np.abs(before - top_p)[keep].min() < 1e-5)
    keep &= (before < top_p) | (top_p >= 1)
    close |= bool(min_p > 0 and np.abs(weights / min_p - 1)[keep].min() < 1e-5)
    keep &= weights >= min_p
    keep[0] = True
    mask = np.zeros(len(order), np.bool_)
    mask[order[keep]] = True
    return mask, close


def check(kernel, draws, *, at_most_unsure=0.05, **options):
    """Compare all rows; those where the reference is within rounding of another answer are counted."""
    tokens, logprobs = kernel(*draws.tuple(), **options)
    assert tokens.dtype == torch.int64
    assert logprobs.dtype == torch.float32
    clean = draws.logits.double()
    left, unsure = clean.clone(), torch.zeros(len(clean), dtype=torch.bool)
    rules = draws.truncation
    for i in range(len(clean) if rules else 0):
        each = (float(rules.temperatures[i]), int(rules.top_k[i]), float(rules.top_p[i]), float(rules.min_p[i]))
        mask, unsure[i] = kept(draws.logits[i], *each)
        left[i, ~torch.from_numpy(mask)] = float("-inf")
    scores = left * torch.where(draws.inverse > 0, draws.inverse, 1.0).double()[:, None]
    times = log_race_times(noise_keys_on_device(draws.counters), clean.shape[-1])
    scores = scores - torch.where(draws.inverse[:, None] > 0, times, 0.0)
    best = scores.topk(2).values
    random = draws.inverse > 0
    unsure |= random & (best[:, 0] - best[:, 1] <= 2.0**-51 * (best[:, 0].abs() + 64))
    assert int(unsure.sum()) <= at_most_unsure * len(unsure)
    assert tokens[~unsure].tolist() == scores.argmax(-1)[~unsure].tolist()
    expected = (clean * draws.scales.double()[:, None]).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0, equal_nan=True)
    return tokens


# 11 is less than a block, 513 and 5 001 do not fill their last, and the larger ones are read in larger blocks to take
# less time.
SIZES = [(30, 11, 512), (30, 513, 512), (8, 5001, 1024), (4, 32_000, 4096), (2, 151_936, 16_384)]


@pytest.mark.parametrize(("n", "vocabulary", "block"), SIZES)
def test_tokens_and_logprobs_are_the_references(kernel, n, vocabulary, block):
    check(kernel, make(n, vocabulary), block=block)


RULES = [("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p"), ("top_k", "top_p", "min_p")]


@pytest.mark.parametrize(
    ("rules", "size"), values_first({"+".join(each): each for each in RULES}, [(12, 11), (8, 700)])
)
def test_what_may_be_sampled_is_what_a_sort_keeps(kernel, rules, size):
    check(kernel, make(*size, rules=rules, seed=1), at_most_unsure=0.15)


def test_truncation_of_a_large_vocabulary(kernel):
    check(kernel, make(2, 151_936, rules=RULES[-1], seed=3), at_most_unsure=0.5, block=16_384)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("rules", [(), RULES[-1]], ids=["clean", "truncated"])
def test_many_draws(kernel, part, rules):
    """10 000 rows in all, at one block and at several."""
    for seed, (vocabulary, spread) in enumerate([(11, 1.0), (50, 4.0), (513, 0.5), (513, 12.0), (1500, 3.0)]):
        check(kernel, make(100, vocabulary, spread=spread, rules=rules, seed=100 * part + seed), block=256)


def test_any_number_of_splits_gives_the_same_tokens(kernel):
    """Each lane of a small block sees many tokens, and the winner is in any split."""
    draws = make(4, 400)
    expected = check(kernel, draws)
    for block, splits in ((16, 64), (16, 3), (32, 1)):
        assert check(kernel, draws, block=block, most_splits=splits).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("dtype", "rules"), values_first([torch.bfloat16, torch.float16], {"clean": (), "truncated": ("top_k", "top_p")})
)
def test_half_precision_is_sampled_from_as_it_is(kernel, dtype, rules):
    """Few values, so many are equal: greedy draws and cuts have to take the smaller ids."""
    check(kernel, make(8, 300, dtype=dtype, rules=rules, spread=0.5, gaps=0.0, seed=5), at_most_unsure=0.2, block=64)


def test_of_equal_logits_the_greedy_draw_takes_the_first(kernel):
    draws = make(4, 200, gaps=0.0)
    draws.logits.clamp_(max=1.5)
    draws.inverse.zero_()
    check(kernel, draws, block=16)


def test_a_cut_among_equal_logits_keeps_the_smaller_ids(kernel):
    """All tokens but one are alike: the rules can only be told by ids."""
    draws = make(10, 90, gaps=0.0, rules=("top_k",), seed=2)
    draws.logits.zero_()
    draws.logits[:, 70] = 0.25
    draws.inverse.fill_(1.0)
    draws.truncation.temperatures.fill_(1.0)
    draws.truncation.top_k.copy_(torch.arange(10) * 3 % 7)
    draws.truncation.top_p[5:] = 0.0503
    check(kernel, draws, block=32)


def test_lines_with_space_between_them(kernel):
    draws = make(3, 100, rules=("top_p",))
    wide = torch.full((3, 131), 50.0)
    wide[:, :100] = draws.logits
    strided = Draws(**{**vars(draws), "logits": wide[:, :100]})
    assert kernel(*strided.tuple())[0].tolist() == kernel(*draws.tuple())[0].tolist()
    across = Draws(**{**vars(draws), "logits": draws.logits.T.contiguous().T})
    assert kernel(*across.tuple())[0].tolist() == kernel(*draws.tuple())[0].tolist()


def test_of_two_scores_that_a_float32_cannot_tell_apart_the_larger_wins(kernel):
    """Another token's logit is set so that its score is that of the winner, up to a rounding of float32."""
    n, vocabulary = 24, 64
    draws = make(n, vocabulary, gaps=0.0, spread=1.0)
    draws.inverse.fill_(1.0)
    times = log_race_times(noise_keys_on_device(draws.counters), vocabulary)
    scores = draws.logits.double() - times
    winner = scores.argmax(-1)
    lanes = (
        winner + torch.where(torch.arange(n) % 2 == 0, 32, 7)
    ) % vocabulary  # half of them in the winner's own lane
    rows = torch.arange(n)
    draws.logits[rows, lanes] = (scores[rows, winner] + times[rows, lanes]).float()
    scores = draws.logits.double() - times
    won = scores.argmax(-1)
    assert 0.2 < float((won == winner).float().mean()) < 0.8, "no close race"
    for splits in (1, 2):
        assert check(kernel, draws, block=16, most_splits=splits).tolist() == won.tolist()


def splitmix_inverse(state: int) -> int:
    def unshift(value: int, by: int) -> int:
        result = value
        for _ in range(64 // by):
            result = value ^ (result >> by)
        return result

    value = unshift(state, 31) * pow(_SECOND, -1, 2**64) % 2**64
    value = unshift(value, 27) * pow(_FIRST, -1, 2**64) % 2**64
    return (unshift(value, 30) - _GOLDEN) % 2**64


def mix32(value: int) -> int:
    value ^= value >> 16
    value = value * 0x7FEB352D % 2**32
    value ^= value >> 15
    value = value * 0x846CA68B % 2**32
    return value ^ value >> 16


def mix32_inverse(value: int) -> int:
    value ^= value >> 16
    value = value * pow(0x846CA68B, -1, 2**32) % 2**32
    value ^= value >> 15 ^ value >> 30
    value = value * pow(0x7FEB352D, -1, 2**32) % 2**32
    return value ^ value >> 16


def counter_with(token: int, high: int, *, salt: int) -> int:
    """Return one at which the leading 32 bits of the token's w are `high`."""
    k1 = (mix32_inverse(high) - mix32(token ^ salt)) % 2**32
    counter = splitmix_inverse(k1 << 32 | salt)
    return counter - 2**64 if counter >= 2**63 else counter


@pytest.mark.parametrize(
    "high",
    [0, 2**30, 2**32 - 1, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 255, 2**30 - 256, 2**32 - 2))],
)
def test_the_ends_of_the_noise(kernel, high):
    """w goes from 2^-64 to 1: the token is so improbable, or so probable, that each bit of w decides in some row."""
    n, vocabulary, token = 16, 40, 17
    draws = make(n, vocabulary, gaps=0.0, spread=0.5, seed=high % 97)
    counters = [counter_with(token, high, salt=1000 + i) for i in range(n)]
    draws.counters.copy_(torch.tensor(counters))
    draws.inverse.fill_(1.0)
    times = log_race_times(noise_keys_on_device(draws.counters), vocabulary)
    w = high * 2.0**-32
    assert torch.all((-torch.expm1(-times[:, token].exp()) - w).abs() < 2.0**-31)
    others = (draws.logits.double() - times).index_fill(1, torch.tensor([token]), float("-inf")).amax(-1)
    draws.logits[:, token] = (others + times[:, token] + torch.linspace(-3e-5, 3e-5, n)).float()
    tokens = check(kernel, draws, block=16)
    assert 0.2 < float((tokens == token).float().mean()) < 0.8


def test_noise_that_float64_rounds_to_one(kernel):
    """The reference takes it for 1 - 2^-53."""
    salts = [2802983, 3318586, 11384632, 16176823, 22419022, 29349955, 30178607, 30482218]
    draws = make(len(salts), 40, gaps=0.0, spread=0.5)
    draws.counters.copy_(torch.tensor([counter_with(17, 2**32 - 1, salt=salt) for salt in salts]))
    draws.inverse.fill_(1.0)
    times = log_race_times(noise_keys_on_device(draws.counters), 40)
    assert torch.allclose(times[:, 17].exp(), torch.tensor(53 * np.log(2)), rtol=1e-12)
    others = (draws.logits.double() - times).index_fill(1, torch.tensor([17]), float("-inf")).amax(-1)
    draws.logits[:, 17] = (others + times[:, 17] + torch.linspace(-1e-3, 1e-3, len(salts))).float()
    assert (check(kernel, draws, block=16) == 17).tolist() == [False] * 4 + [True] * 4


def test_a_token_of_uncertain_noise_can_be_the_only_one_left(kernel):
    draws = make(2, 40, rules=("top_k",))
    draws.counters.copy_(torch.tensor([counter_with(17, 2**32 - 1, salt=i) for i in range(2)]))
    draws.logits[:, 17] = 99.0
    draws.inverse.fill_(1.0)
    draws.truncation.top_k.fill_(1)
    assert check(kernel, draws, block=16).tolist() == [17, 17]


def test_what_is_no_number(kernel):
    """Where nothing may be sampled the token is 0; NaN makes the log-prob not finite, which the engine refuses."""
    draws = make(6, 50, gaps=0.0)
    draws.logits[0] = float("-inf")
    draws.logits[1, 7] = float("nan")
    draws.logits[2] = float("nan")
    draws.logits[3, 30] = float("inf")
    draws.inverse[3] = 1.0
    tokens, logprobs = kernel(*draws.tuple(), block=16)
    assert tokens[0] == 0
    assert tokens[3] == 30
    assert ((tokens >= 0) & (tokens < 50)).all()
    assert logprobs.isfinite().tolist() == [False] * 4 + [True] * 2
    assert torch.equal(kernel(*draws.tuple(), block=16, most_splits=1)[0], tokens)


def test_large_logits_are_told_apart_and_unlikely_ones_add_up(kernel):
    """The last bit of such logits is more than the distance of most scores; then one logit above a flat line."""
    draws = make(6, 300, spread=1.0, gaps=0.0)
    draws.logits[:3] += 3e6
    draws.logits[3:] = 17.3
    draws.logits[3:, 7] += torch.tensor([5.0, 9.0, 12.0])
    check(kernel, draws, block=16)


def test_no_draws(kernel):
    tokens, logprobs = kernel(*make(1, 5).tuple())
    assert len(tokens) == len(logprobs) == 1
    empty = [each[:0] for each in make(1, 5).tuple()[:4]]
    assert [len(each) for each in kernel(*empty)] == [0, 0]
    assert [len(each) for each in draw_with_logprobs(*empty)] == [0, 0]


@pytest.mark.parametrize("rules", [(), ("top_k", "top_p", "min_p")], ids=["clean", "truncated"])
def test_the_torch_form_says_the_same(kernel, rules):
    draws = make(12, 100, rules=rules, seed=8)
    tokens, logprobs = draw_with_logprobs(*draws.tuple())
    found = kernel(*draws.tuple(), block=32)
    assert found[0].tolist() == tokens.tolist()
    torch.testing.assert_close(found[1], logprobs, atol=1e-5, rtol=0)
