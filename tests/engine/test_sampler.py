"""The draw: the model's own distribution, independent from draw to draw, the same compiled and not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rhymerl.engine.device_draw import log_norms
from rhymerl.engine.draw import chosen_logprobs, draw_tokens
from rhymerl.engine.noise import log_race_times, noise_keys
from rhymerl.engine.truncation import truncate


def draws(logits: np.ndarray, seeds: np.ndarray, positions: np.ndarray, *, temperature: float = 1.0) -> np.ndarray:
    """One token a (seed, position) from the same logits [V]."""
    out = np.empty(len(seeds), np.int32)
    keys = noise_keys(seeds.astype(np.uint64), positions.astype(np.int64))
    rows, inverse = np.zeros(len(seeds), np.int64), np.full(len(seeds), 1 / temperature if temperature else 0.0)
    draw_tokens(logits[None], rows, inverse, keys, out)
    return out


def p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom, half = torch.tensor((expected.size - 1) / 2), torch.tensor(statistic / 2)
    return float(torch.special.gammaincc(freedom.double(), half))


@pytest.mark.parametrize("over", ["positions", "seeds"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_follow_the_softmax(over, temperature):
    count = 200_000
    logits = np.array([2.0, 1.5, 0.0, -1.0, -3.0, -6.0])
    fixed, running = np.full(count, 1234), np.arange(count)
    seeds, positions = (fixed, running) if over == "positions" else (running, fixed)
    observed = np.bincount(draws(logits, seeds, positions, temperature=temperature), minlength=6)
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum() * count
    assert p_value(observed, expected) > 1e-3


def test_a_token_of_probability_one_in_a_million_is_sampled_as_often_as_it_should():
    count = 4_000_000
    rare = np.log(1e-5)
    observed = (draws(np.array([0.0, rare]), np.full(count, 5), np.arange(count)) == 1).sum()
    assert 40 - 4.5 * 40**0.5 < observed < 40 + 4.5 * 40**0.5


@pytest.mark.parametrize("what", ["epochs", "samples", "positions"])
def test_two_draws_are_independent(what):
    """The joint counts of paired draws are those of independent ones; a reused seed would put all on the diagonal."""
    count = 100_000
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    seeds, positions = np.arange(count), np.full(count, 3)
    other = {
        "epochs": (seeds + 10**9, positions),
        "samples": (seeds + 1, positions),
        "positions": (seeds, positions + 1),
    }
    first, second = draws(logits, seeds, positions), draws(logits, *other[what])
    observed = np.bincount(first * 4 + second, minlength=16)
    expected = np.outer(np.exp(logits), np.exp(logits)).reshape(-1) * count
    assert p_value(observed, expected) > 1e-3
    reused = np.bincount(first * 4 + first, minlength=16)
    assert p_value(reused, expected) < 1e-9, "this test could not tell a reused seed"


@pytest.mark.parametrize("position", [*range(16), 127, 128, 255, 256, 32767, 65535])
def test_neighbouring_positions_are_independent(position):
    """Whichever they are: a bit of the position that is lost would be shared by two of them."""
    count = 50_000
    probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    first, second = (
        draws(np.log(probabilities), np.arange(count), np.full(count, at)) for at in (position, position + 1)
    )
    observed = np.bincount(first * 4 + second, minlength=16)
    assert p_value(observed, np.outer(probabilities, probabilities).reshape(-1) * count) > 1e-4


def test_no_two_positions_share_their_keys():
    keys = noise_keys(np.repeat(np.arange(16), 4096).astype(np.uint64), np.tile(np.arange(4096), 16))
    assert len(np.unique(keys, axis=0)) == 16 * 4096


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(2, np.float64), (19, np.float32), (513, np.float32), (5000, np.float64)]
)
def test_compiled_draw_is_the_reference_race(vocabulary, dtype):
    generator = np.random.default_rng(vocabulary)
    logits = (generator.normal(size=(200, vocabulary)) * 4).astype(dtype)
    logits[:, ::3] = np.where(generator.random(logits[:, ::3].shape) < 0.3, -np.inf, logits[:, ::3])
    logits[:, 1] = 30 * generator.random(200)
    keys = noise_keys(generator.integers(0, 2**63, 200).astype(np.uint64), generator.integers(0, 9999, 200))
    out = np.empty(200, np.int32)
    draw_tokens(logits, np.arange(200), np.full(200, 1 / 0.9), keys, out)
    race = torch.from_numpy(logits).double() / 0.9 - log_race_times(torch.from_numpy(keys.astype(np.int64)), vocabulary)
    np.testing.assert_array_equal(out, race.argmax(-1).numpy())


@pytest.mark.parametrize("magnitude", [3e3, 3e6])
def test_the_draw_is_exact_where_a_float32_could_not_tell_logits_apart(magnitude):
    """Large float64 logits at a small temperature: what decides is in digits that a float32 does not have."""
    generator = np.random.default_rng(0)
    logits = magnitude + generator.normal(size=(4_000, 50)) * 3e-3
    keys = noise_keys(generator.integers(0, 2**63, 4_000).astype(np.uint64), np.arange(4_000))
    out = np.empty(4_000, np.int32)
    draw_tokens(logits, np.arange(4_000), np.full(4_000, 1e3), keys, out)
    top = logits.max(-1, keepdims=True)
    race = torch.from_numpy((logits - top) * 1e3) - log_race_times(torch.from_numpy(keys.astype(np.int64)), 50)
    np.testing.assert_array_equal(out, race.argmax(-1).numpy())


def apart(lines: torch.Tensor, inverse_temperature: float, *, compiled: bool) -> float:
    """The largest difference from the log-probs that float64 gives, in nats, over each line's first tokens."""
    tokens, rows = np.tile(np.arange(10, dtype=np.int32), len(lines)), np.repeat(np.arange(len(lines)), 10)
    expected = (lines.double() * inverse_temperature).log_softmax(-1)[rows, tokens]
    if compiled:
        found = np.empty(len(tokens))
        chosen_logprobs(lines.numpy(), rows, np.full(len(tokens), inverse_temperature), tokens, found)
        found = torch.from_numpy(found)
    else:
        norms = log_norms(lines, torch.full((len(lines),), inverse_temperature, dtype=torch.float64))
        found = lines.double()[rows, tokens] * inverse_temperature - norms[rows]
    return float((expected - found).masked_fill(expected == found, 0).abs().max())  # infinite ones are equal


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("spread", [1.0, 4.0, 40.0])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_logprobs_are_those_of_float64(dtype, most, spread, temperature, compiled):
    """The logits range from flat ones to those of which exp makes numbers that a float32 cannot hold."""
    lines = torch.randn(8, 50_000, dtype=dtype, generator=torch.Generator().manual_seed(1)) * spread + 30
    lines[0, 7] = 200.0
    lines[1, ::2] = float("-inf")
    assert apart(lines, 1 / temperature, compiled=compiled) < most


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("above", [5.0, 9.0, 12.0, 13.7])
def test_rounding_does_not_add_up_when_all_but_one_are_alike(above, compiled):
    lines = torch.full((1, 150_000), 17.3)
    lines[0, 7] += above
    assert apart(lines, 1.0, compiled=compiled) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logprobs_of_what_is_no_number_are_not_finite(dtype):
    """So that weights which are none cost an error, not a run."""
    lines = torch.zeros(4, 700, dtype=dtype)
    lines[0, 3], lines[1, 699], lines[2, 0] = float("nan"), float("nan"), float("inf")
    tokens, found = np.full(4, 5, np.int32), np.empty(4)
    chosen_logprobs(lines.numpy(), np.arange(4), np.ones(4), tokens, found)
    norms = log_norms(lines, torch.ones(4, dtype=torch.float64))
    assert np.isfinite(found).tolist() == norms.isfinite().tolist() == [False, False, False, True]


def test_no_number_is_too_small_to_hold():
    """Such numbers used to take ten times as long."""
    lines = torch.randn(1, 700, generator=torch.Generator().manual_seed(1))
    lines[0, 0] = 95.0
    with np.errstate(all="raise"):  # NumPy's numbers tell of those that compiled code only computes slowly
        chosen_logprobs.__wrapped__(
            lines.numpy(), np.zeros(1, np.int64), np.ones(1), np.zeros(1, np.int32), np.empty(1)
        )


def test_greedy_takes_the_first_of_equals():
    assert draws(np.array([0.0, 2.0, 2.0]), np.arange(5), np.arange(5), temperature=0.0).tolist() == [1] * 5


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 1]),
        ({"min_p": 0.39}, [0, 1, 2]),  # p = 0.5, 0.25, 0.2, 0.05; 0.39 * 0.5 = 0.195
        ({"top_k": 3, "top_p": 0.75}, [0, 1]),  # renormalised over three: 0.526, 0.263, 0.211
        ({"temperature": 0.5, "top_p": 0.9}, [0, 1]),  # squares: 0.708, 0.177, 0.113, 0.007 -> 0.885 before the third
    ],
)
def test_truncation_by_hand(settings, kept):
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.2, 0.05]], dtype=torch.float64))
    result = truncate(logits, **{name: torch.tensor([value]) for name, value in full.items()})
    if settings.get("temperature"):
        kept = [0, 1, 2]
    assert torch.isfinite(result[0]).nonzero()[:, 0].tolist() == kept
    assert logits.isfinite().all(), "truncation touched the clean logits"


def test_a_rule_that_is_off_rules_out_nothing_whatever_others_in_the_batch_ask_for():
    logits = torch.randn(8, 32_000) * 2
    ones, zeros = torch.ones(8), torch.zeros(8)
    top_p = torch.where(torch.arange(8) < 4, 0.5, 1.0)
    result = truncate(logits, ones, zeros.long(), top_p, zeros)
    assert torch.equal(result[4:], logits[4:])
    assert not result[:4].isfinite().all(-1).any()
