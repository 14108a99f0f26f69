"""The draw in torch, for any device, against the compiled one and its noise."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.engine import draw
from rhymerl.engine.noise import noise_counters, noise_keys, noise_keys_on_device


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**62)), min_size=1, max_size=20))
def test_keys_are_the_same_64_bits_signed_and_not(pairs):
    seeds, positions = (np.array(each, np.uint64) for each in zip(*pairs, strict=True))
    sums = torch.from_numpy((noise_counters(seeds) + positions).view(np.int64))
    assert noise_keys_on_device(sums).tolist() == noise_keys(seeds, positions.astype(np.int64)).tolist()


def problem(count: int, vocabulary: int, dtype: str):
    """Logits [count, vocabulary] with gaps, inverse temperatures and keys; some draws are greedy."""
    source = np.random.default_rng(vocabulary)
    logits = (source.normal(size=(count, vocabulary)) * 4).astype(dtype)
    logits[source.random(logits.shape) < 0.2] = -np.inf
    logits[:, 1] = 3
    scales = source.choice([0.0, 1.0, 1 / 0.7], count)
    keys = noise_keys(source.integers(0, 2**63, count).astype(np.uint64), source.integers(0, 9999, count))
    return logits, scales, keys


def on_device(logits, scales, keys, *, race=draw.draw_on_device):
    keys = torch.from_numpy(keys.astype(np.int64))
    return race(torch.from_numpy(logits), torch.from_numpy(scales), keys)


def compiled(logits, scales, keys):
    out = np.empty(len(logits), np.int32)
    draw.draw_tokens(logits, np.arange(len(logits)), scales, keys, out)
    return out


@pytest.mark.parametrize("at_once", [1, 1000, 2**24], ids=["line by line", "some lines", "whole"])
@pytest.mark.parametrize(("vocabulary", "dtype"), [(2, "float64"), (19, "float32"), (513, "float32")])
def test_tokens_are_those_of_the_compiled_draw(vocabulary, dtype, at_once, monkeypatch):
    monkeypatch.setattr(draw, "_AT_ONCE", at_once)
    given_ = problem(301, vocabulary, dtype)
    sampled = on_device(*given_)
    assert sampled.dtype == torch.int64
    np.testing.assert_array_equal(sampled.numpy(), compiled(*given_))


def test_of_equal_logits_the_greedy_draw_takes_the_first():
    keys = noise_keys(np.arange(3, dtype=np.uint64), np.arange(3))
    assert on_device(np.zeros((3, 9), np.float32), np.zeros(3), keys).tolist() == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_tokens_are_the_same_when_torch_compiles_the_race():
    import torch._inductor.config

    with torch._inductor.config.patch(compile_threads=1):
        race = torch.compile(draw._race, dynamic=True)
        for count, vocabulary in ((64, 513), (7, 30), (300, 1000)):
            given_ = problem(count, vocabulary, "float32")
            np.testing.assert_array_equal(on_device(*given_, race=race).numpy(), compiled(*given_))
