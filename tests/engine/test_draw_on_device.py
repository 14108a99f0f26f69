"""The draw in torch, for any device, against the compiled one and its noise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.drafts import Draft, DraftBatch
from rhymerl.engine import device_draw
from rhymerl.engine.draw import draw_tokens
from rhymerl.engine.layout import lay_out_pass
from rhymerl.engine.noise import keys_at, noise_counters, noise_keys, noise_keys_on_device
from rhymerl.engine.rows import Rows, SlotPool
from rhymerl.engine.sampler import DeviceSampler, HostSampler, draws_of
from rhymerl.testing import make_requests


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**62)), min_size=1, max_size=20))
def test_keys_are_the_same_64_bits_signed_and_not(pairs):
    seeds, positions = (np.array(each, np.uint64) for each in zip(*pairs, strict=True))
    sums = torch.from_numpy((noise_counters(seeds) + positions).view(np.int64))
    assert noise_keys_on_device(sums).tolist() == noise_keys(seeds, positions.astype(np.int64)).tolist()


def problem(count: int, vocabulary: int, dtype: str):
    """Logits [count, vocabulary] with gaps, inverse temperatures and counters; some draws are greedy."""
    source = np.random.default_rng(vocabulary)
    logits = (source.normal(size=(count, vocabulary)) * 4).astype(dtype)
    logits[source.random(logits.shape) < 0.2] = -np.inf
    logits[:, 1] = 3
    scales = source.choice([0.0, 1.0, 1 / 0.7], count)
    return logits, scales, source.integers(0, 2**63, count).astype(np.uint64)


def on_device(logits, scales, counters):
    ones = torch.ones(len(logits), dtype=torch.float64)
    draws = (torch.from_numpy(each) for each in (logits, counters.view(np.int64), scales))
    return device_draw.draw_with_logprobs(*draws, ones)


def compiled(logits, scales, counters):
    out = np.empty(len(logits), np.int32)
    keys = keys_at(counters, np.zeros(len(counters), np.int64))
    draw_tokens(logits, np.arange(len(logits)), scales, keys, out)
    return out


@pytest.mark.parametrize("at_once", [1, 1000, 2**24], ids=["line by line", "some lines", "whole"])
@pytest.mark.parametrize(("vocabulary", "dtype"), [(2, "float64"), (19, "float32"), (513, "float32")])
def test_tokens_are_those_of_the_compiled_draw(vocabulary, dtype, at_once, monkeypatch):
    monkeypatch.setattr(device_draw, "AT_ONCE", at_once)
    given_ = problem(301, vocabulary, dtype)
    sampled, logprobs = on_device(*given_)
    assert sampled.dtype == torch.int64
    np.testing.assert_array_equal(sampled.numpy(), compiled(*given_))
    expected = torch.from_numpy(given_[0]).double().log_softmax(-1).gather(-1, sampled[:, None])[:, 0]
    assert logprobs.dtype == getattr(torch, dtype)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-6 if dtype == "float32" else 1e-12, rtol=0)


def test_of_equal_logits_the_greedy_draw_takes_the_first():
    tokens, _ = on_device(np.zeros((3, 9), np.float32), np.zeros(3), np.arange(3, dtype=np.uint64))
    assert tokens.tolist() == [0, 0, 0]


RULES = ({}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 5, "min_p": 0.05})


@pytest.mark.parametrize("rules", [RULES, RULES[:2]], ids=["with rules", "without"])
def test_the_sampler_draws_the_same_on_a_device(rules):
    """At all roots and nodes of a pass at once, on the CPU: the same tokens and log-probs as the host's."""
    rows = Rows(4, 64, SlotPool(64))
    for i, each in enumerate(rules):
        request = make_requests(1, seed=i, **each)[0]
        rows.enter(dataclasses.replace(request, seed=-i), None)
    row = rows.is_request.nonzero()[0]
    rows.cached[row] = rows.length[row] - 1
    tree = Draft(token_ids=np.array([3, 1, 2]), parents=np.array([-1, 0, 0]))
    emits = np.arange(len(row))
    layout = lay_out_pass(rows, row, np.ones(len(row), np.int64), emits, DraftBatch.pack([tree] * len(row)))
    logits = torch.randn(len(layout.logit_row), 200) * 3
    here = HostSampler(logits, rows)
    there = DeviceSampler(logits, [torch.from_numpy(each) for each in draws_of(layout, rows)])
    assert there.draws_ahead
    owner = row[layout.logit_row]
    positions = rows.length[owner] - rows.prompt_length[owner] + layout.logit_level
    for indices in (np.array([3, 7, 1]), np.arange(len(owner))):
        arguments = indices, owner[indices], positions[indices]
        tokens = here.draw(*arguments)
        np.testing.assert_array_equal(there.draw(*arguments), tokens)
        expected = here.logprobs(indices, owner[indices], tokens)
        np.testing.assert_allclose(there.logprobs(indices, owner[indices], tokens), expected, atol=1e-5)
