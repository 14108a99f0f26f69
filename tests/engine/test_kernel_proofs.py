"""Kernels that compute something else than torch does are noticed at the start, and not used."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from rhymerl.engine.engine import Engine
from rhymerl.engine.layer_steps import TorchSteps, TritonSteps
from rhymerl.testing import make_requests, tiny_policy
from tests.engine.torch_kernels import add_rms_norm, attend, turn_and_store
from tests.models.windowed import windowed_model

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def right_in_one_block(query, keys, values, tiles, *rest, **how):
    out = attend(query, keys, values, tiles, *rest, **how)
    for first, count, _, _, num_keys in tiles.tolist():
        if num_keys > 64:
            out[first : first + count] = 0
    return out


def wrong_in_small_tiles(*args, most, **how):
    return attend(*args, most=most, **how) * (1 if most > 8 else 2)


def too_large(*args, **how):
    raise RuntimeError("out of resource: shared memory")


def a_little_larger(*args, **how):
    return 1.01 * attend(*args, **how)


def without_ancestors(query, keys, values, tiles, positions, ancestors, *rest, **how):
    return attend(query, keys, values, tiles, positions, 0 * ancestors, *rest, **how)


def wrong_in_parts(*args, splits=1, **how):
    return attend(*args, **how) * splits


def of_a_longer_window(*args, window=None, **how):
    return attend(*args, window=window and window + 1, **how)


def no_numbers(*args, **how):
    return attend(*args, **how) * float("nan")


@pytest.mark.parametrize(
    "wrong",
    [
        a_little_larger,
        without_ancestors,
        no_numbers,
        right_in_one_block,
        wrong_in_small_tiles,
        wrong_in_parts,
        of_a_longer_window,
        too_large,
    ],
)
def test_attention_that_is_wrong_is_not_used(device, monkeypatch, caplog, wrong):
    from rhymerl.engine import triton_attention

    monkeypatch.setattr(triton_attention, "attend", wrong)
    engine, asked = Engine(windowed_model("mistral", dtype=torch.float32, sliding_window=99)), make_requests(3)
    engine.submit(asked)
    engine.run()
    assert engine.forward.tile_tokens is None
    assert "the GPU's kernels for attention" in caplog.text
    assert "torch's are used" in caplog.text
    assert engine.forward.kind is TritonSteps


def of_other_epsilon(hidden, change, weight, epsilon):
    return add_rms_norm(hidden, change, weight, 0.1)


def without_the_change(hidden, change, weight, epsilon):
    return add_rms_norm(hidden, change, weight, epsilon), hidden.sub_(change)


def turned_back(query, key, value, cos, sin, *rest):
    return turn_and_store(query, key, value, cos, -sin, *rest)


def at_the_next_slot(query, key, value, cos, sin, slots, *rest):
    return turn_and_store(query, key, value, cos, sin, slots + 1, *rest)


def of_values_as_keys(query, key, value, *rest):
    return turn_and_store(query, key, key, *rest)


def without_gate(gate, up):
    return gate * up


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("add_rms_norm", of_other_epsilon),
        ("add_rms_norm", lambda *args: without_the_change(*args)[0]),
        ("add_rms_norm", too_large),
        ("turn_and_store", turned_back),
        ("turn_and_store", at_the_next_slot),
        ("turn_and_store", of_values_as_keys),
        ("silu_times", without_gate),
        ("silu_times", lambda gate, up: up * float("nan")),
    ],
)
def test_steps_between_products_that_are_wrong_are_not_used(device, monkeypatch, caplog, name, wrong):
    from rhymerl.engine import triton_layers

    monkeypatch.setattr(triton_layers, name, wrong)
    policy, asked = tiny_policy(dtype="float32"), make_requests(3)
    engine = Engine(policy.model)
    engine.submit(asked)
    engine.run()
    assert "the GPU's kernels between products" in caplog.text
    assert engine.forward.kind is TorchSteps
    assert engine.forward.tile_tokens is not None
