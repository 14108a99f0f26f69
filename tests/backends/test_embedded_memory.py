"""For how many tokens the embedded engine keeps keys and values."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.drafters import NoDrafter
from rhymerl.engine.engine import Engine
from rhymerl.errors import ConfigError
from rhymerl.memory.base import GIB
from rhymerl.memory.outline import model_shape
from rhymerl.testing import make_requests, tiny_policy
from tests.models.hybrid import HYBRIDS, hybrid_model


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A policy that says to be on a GPU with 3 GiB free, of which two are set aside where nothing is trained."""
    policy = tiny_policy(dtype="bfloat16")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 80 * GIB))
    return SimpleNamespace(device=torch.device("cuda"), model=policy.model, context_tokens=policy.context_tokens)


def kv_bytes(model, itemsize: int) -> int:
    config = model.config
    head_size = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * itemsize


@pytest.mark.parametrize("cast", [False, True])
def test_a_gpu_has_as_many_as_it_has_room_for(gpu, cast, monkeypatch):
    """Autocast computes in two bytes, whatever weights have, and keeps copies of them."""
    gpu.model.to(torch.float32 if cast else torch.bfloat16)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: cast)
    copies = 2 * gpu.model.num_parameters() if cast else 0
    expected = int(0.9 * (GIB - copies)) // kv_bytes(gpu.model, 2)
    assert EmbeddedBackend(max_running=10**6)._kv_tokens(gpu) == expected


@pytest.mark.parametrize("family", [*HYBRIDS, "qwen2"])
def test_the_plan_knows_what_layers_without_keys_keep(family):
    """As many bytes as an engine has allocated, and keys in as many layers."""
    model = hybrid_model(family, dtype=torch.float32) if family in HYBRIDS else tiny_policy(family).model.float()
    engine, backend = Engine(model, max_running=3), EmbeddedBackend(max_running=3)
    found = backend.memory(model_shape(model, 64), NoDrafter(), None)
    states = engine.kv.states
    kept = [*(each._inputs for each in states._convs.values()), *(each._states for each in states._rules.values())]
    assert found.row_states == sum(each.nbytes for each in kept)
    assert (found.row_states > 0) == (family in HYBRIDS)
    per_token = [each.keys[0].nbytes + each.values[0].nbytes for each in engine.kv.stores if each.is_initialized]
    assert found.kv_of_token == sum(per_token)
    assert found.parts["keys_and_values"] == 64 * sum(per_token) + found.row_states


def test_but_not_more_than_running_requests_can_need(gpu):
    backend = EmbeddedBackend(max_running=4)
    backend.check(100)
    assert backend._kv_tokens(gpu) == 2 * 4 * 100


def test_a_gpu_without_room_for_the_longest_answer_is_told_before_a_token(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB + 4096, 80 * GIB))
    backend = EmbeddedBackend()
    backend.check(200)
    with pytest.raises(ConfigError, match=r"room for keys and values of 28 tokens.*need 200; expected fewer"):
        backend._kv_tokens(gpu)


def test_keys_and_values_are_gone_when_the_engine_is_closed():
    """Even before Python looks for circles: the next engine is sized by what is free."""
    backend = EmbeddedBackend()
    backend.start(tiny_policy(), NoDrafter())
    kept = [weakref.ref(tensor) for store in backend.engine.kv.stores for tensor in (store.keys, store.values)]
    gc.collect()
    gc.disable()
    try:
        backend.close()
        assert [each() for each in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_a_plan_counts_what_there_has_to_be(gpu):
    """The engine takes what is left beside that."""
    shape = model_shape(gpu.model, 100, compute_itemsize=2)
    assert EmbeddedBackend().memory(shape, NoDrafter(), None).longest_tokens == 100
    assert EmbeddedBackend(kv_tokens=900).memory(shape, NoDrafter(), None).longest_tokens == 900


def test_a_cpu_has_the_usual_number_or_what_the_longest_answer_needs():
    policy = tiny_policy()
    for backend, expected in ((EmbeddedBackend(), 65_536), (EmbeddedBackend(kv_tokens=123), 123)):
        with backend:
            backend.check(100)
            backend.start(policy, NoDrafter())
            assert backend.engine.kv.num_slots == min(expected, 2 * 64 * policy.context_tokens)
            backend.submit(make_requests(2, max_tokens=3))
    backend = EmbeddedBackend()
    backend.check(70_000)
    assert backend._kv_tokens(policy) == 70_000
