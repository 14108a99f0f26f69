"""Passes in tiles and by graphs on a CPU: a graph is the work itself, and attention is written out in torch.

The kernel is in test_triton_attention.py, and both together on a GPU in test_device.py.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from rhymerl.bench.costs import PathDrafter
from rhymerl.budgets import FixedBudget
from rhymerl.drafts import Draft, DraftBatch
from rhymerl.engine import graphs as graphs_module
from rhymerl.engine import inputs
from rhymerl.engine.engine import Engine
from rhymerl.engine.graphs import Graphs, rounded
from rhymerl.engine.layer_steps import TritonSteps
from rhymerl.engine.layout import lay_out_pass
from rhymerl.engine.rows import Rows, SlotPool
from rhymerl.testing import RandomTreeDrafter, make_requests, tiny_policy
from tests.engine.test_device_pass import Seen, requests_of_all_kinds
from tests.engine.test_lossless import answers, assert_same
from tests.engine.torch_kernels import STEPS, attend
from tests.models.small import with_other_heads_by_layer
from tests.models.windowed import InDouble, windowed_model
from tests.products import values_first

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize(("model_type", "drafted"), values_first(["qwen2", "qwen3", "llama"], [False, True]))
def test_tokens_are_those_of_the_host(request, model_type, drafted):
    policy, asked = tiny_policy(model_type), requests_of_all_kinds()
    here = answers(policy, asked, max_running=6)
    request.getfixturevalue("device")
    there = answers(policy, asked, max_running=6, drafter=RandomTreeDrafter() if drafted else None)
    assert_same(here, there)


@pytest.mark.parametrize("most", [1, 2, 8])
def test_tiles_say_what_the_mask_says(most):
    source = np.random.default_rng(most)
    rows = Rows(8, 200, SlotPool(900))
    prefix = rows.enter_prefix(source.integers(0, 9, 30, dtype=np.int32))
    row = np.array([prefix.row, *(rows.enter(request, None) for request in make_requests(4))])
    chain = rows.length[row]
    parents = [np.array([source.integers(-1, node) for node in range(size)], int) for size in (0, 5, 63, 12)]
    drafts = DraftBatch.pack([Draft(token_ids=np.zeros(len(each), int), parents=each) for each in parents])
    emits = np.arange(1, 5)
    layout = lay_out_pass(rows, row, chain, emits, drafts, tile_tokens=lambda widest: most)
    tiles = layout.tiles
    assert tiles is not None
    assert not layout.buckets
    plain = lay_out_pass(rows, row, chain, emits, drafts)  # the same rows, which get other slots
    by_token: dict[int, tuple[int, int, int]] = {}
    for first, count, begin, root, num_keys in tiles.tiles.tolist():
        assert 0 < count <= most
        by_token |= dict.fromkeys(range(first, first + count), (begin, root, num_keys))
    assert sorted(by_token) == list(range(layout.num_tokens))
    to_other = dict(zip(layout.slots.tolist(), plain.slots.tolist(), strict=True))
    seen_by_mask = {}
    for bucket in plain.buckets:
        mask = bucket.mask.reshape(-1, bucket.mask.shape[2])
        slots = np.repeat(bucket.kv_slots, bucket.mask.shape[1], 0)
        for query, token in zip(bucket.real.tolist(), bucket.tokens.tolist(), strict=True):
            seen_by_mask[token] = set(slots[query][mask[query]].tolist())
    for n, (begin, root, num_keys) in by_token.items():
        slots = tiles.kv_slots[begin : begin + num_keys]
        nodes = [slot for k, slot in enumerate(slots[root:]) if tiles.ancestors[n] >> k & 1]
        found = {*slots[: min(layout.positions[n] + 1, root)].tolist(), *map(int, nodes)}
        assert {to_other[slot] for slot in found} == seen_by_mask[n]


def test_a_draft_of_too_many_nodes_goes_the_other_way():
    asked = make_requests(3)
    wide = Draft(token_ids=np.zeros(64, int), parents=np.arange(-1, 63))
    rows = Rows(4, 200, SlotPool(900))
    row = np.array([rows.enter(request, None) for request in asked])
    drafts = DraftBatch.pack([wide] * len(row))
    layout = lay_out_pass(rows, row, rows.length[row], np.arange(len(row)), drafts, tile_tokens=lambda widest: 8)
    assert layout.tiles is None
    assert layout.buckets


def done_by(engine, asked):
    engine.submit(asked)
    done = {}
    while engine.has_work:
        done |= {each.request.id: each for each in engine.run()}
    return done


@pytest.fixture
def on_device_as_on_the_host(request):
    """Decode on the host and then on the device, by the kernel, and compare; returns the device's engine."""

    def decoded(model):
        asked = make_requests(4, prompt_tokens=(3, 12), max_tokens=16)
        with InDouble():
            here = answers(SimpleNamespace(model=model), asked, max_running=3)
            request.getfixturevalue("device")
            engine = Engine(model, max_running=3, drafter=RandomTreeDrafter(vocabulary=16))
            done = done_by(engine, asked)
        assert engine.forward.tile_tokens is not None
        assert_same(here, done)
        return engine

    return decoded


@pytest.mark.parametrize(
    ("family", "is_direct"),
    [
        ("mistral", True),
        ("qwen2", True),
        ("gemma2", False),  # soft caps
        ("gpt_oss", False),  # sinks
        ("llama4_text", False),  # chunks
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("gemma3_text", "olmo3", "cohere2", "exaone4")),
    ],
)
def test_tokens_behind_windows_are_those_of_the_host(on_device_as_on_the_host, family, is_direct):
    """Families whose layers are not Llama's go through transformers, to the same kernel."""
    engine = on_device_as_on_the_host(windowed_model(family))
    assert (engine.forward.kind is not None) == is_direct


def test_layers_that_differ_in_their_heads_use_the_kernel(on_device_as_on_the_host):
    on_device_as_on_the_host(with_other_heads_by_layer())


def test_keys_that_are_wider_than_values_are_left_to_torch(device, caplog):
    engine = Engine(windowed_model("deepseek_v3"), max_running=3)
    done_by(engine, make_requests(2, prompt_tokens=(3, 12), max_tokens=4))
    assert engine.forward.tile_tokens is None
    assert "the GPU's kernels for attention do not run (keys and values differ); torch's are used" in caplog.text


def test_graphs_of_short_rows_and_of_long_ones_differ_in_splits(device, monkeypatch):
    from rhymerl.engine import tiles, triton_attention

    called = set()

    def noted(*args, **how):
        called.add(how["splits"])
        return attend(*args, **how)

    monkeypatch.setattr(triton_attention, "attend", noted)
    monkeypatch.setattr(tiles, "_LONG", 20)
    model = tiny_policy(dtype="float32").model
    engine = Engine(model)
    engine.forward._graphs._processors = 4 * model.config.num_key_value_heads
    engine.submit(make_requests(1, max_tokens=40, prompt_tokens=(4, 4), stop_token_ids=()))
    engine.run()
    assert called == {1, 2, 4}  # 2 in the comparison with torch
    assert {splits for _, num_tiles, _, splits in engine.forward._graphs._graphs if num_tiles == 1} == {1, 4}


def launches_of_a_pass(num_layers, monkeypatch, dtype):
    """Return how many operations a pass of 8 rows with drafts takes, each kernel of ours counted once."""
    from rhymerl.engine import triton_attention, triton_layers

    ours = []

    def once(function):
        def call(*args, **how):
            ours.append(function)
            with _disable_current_modes():
                return function(*args, **how)

        return call

    for module, name in [(triton_attention, "attend"), *((triton_layers, each.__name__) for each in STEPS)]:
        monkeypatch.setattr(module, name, once(getattr(module, name)))
    model = tiny_policy(num_layers=num_layers, dtype=dtype).model
    drafter = PathDrafter(8, vocabulary=model.config.vocab_size)
    how = {"autocast": partial(torch.autocast, "cpu", torch.bfloat16)} if dtype == "float32" else {}
    engine = Engine(model, drafter=drafter, budget=FixedBudget(8), max_running=8, **how)
    engine.submit(make_requests(8, max_tokens=30, stop_token_ids=()))
    with engine.forward.ready():
        for _ in range(3):
            engine.step()
        assert engine.forward.kind is TritonSteps
        assert engine.forward.tile_tokens is not None
        ours.clear()
        with Seen() as seen:
            engine.step()
    return seen.launches + len(ours)


@pytest.mark.parametrize(("dtype", "launches"), [("bfloat16", 12), ("float32", 9)])
def test_a_layer_is_twelve_launches(device, monkeypatch, dtype, launches):
    """Seven products, two norms, rotary with the store of keys and values, attention, and the MLP's gate.

    Where autocast makes copies of weights, products of the same input are one: four products.
    """
    found = []
    for num_layers in (2, 6):
        with monkeypatch.context() as patch:
            found.append(launches_of_a_pass(num_layers, patch, dtype))
    assert (found[1] - found[0]) / 4 == launches, found


def test_sizes_of_graphs():
    sizes = [rounded(n) for n in range(1, 4097)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 50
    for n, size in enumerate(sizes, 1):
        assert n <= size <= max(1.25 * n, n + 3)


def run(engine, **how):
    engine.submit(make_requests(5, max_tokens=12, **how))
    done = {}
    while engine.has_work:
        done |= {each.request.id: each for each in engine.run()}
    return done


@pytest.mark.parametrize("cast", [False, True])
def test_graphs_stay_when_weights_change_in_place(device, cast):
    """They read the model's own weights, or casts that are made anew in the same place."""
    how = {"autocast": partial(torch.autocast, "cpu", torch.float16)} if cast else {}
    policy = tiny_policy(dtype="float32")
    engine = Engine(policy.model, max_running=5, **how)
    run(engine)
    graphs = dict(engine.forward._graphs._graphs)
    assert graphs
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5).add_(0.01)  # biases are 0 at first
    engine.new_weights(1)
    found = run(engine)
    assert all(engine.forward._graphs._graphs[key] is graph for key, graph in graphs.items())
    assert_same(found, run(Engine(policy.model, max_running=5, **how)), atol=1e-5)


@pytest.mark.parametrize("cast", [False, True])
def test_graphs_go_when_weights_are_elsewhere(device, cast):
    """Casts alone do not follow them: weights of norms are read where they are."""
    how = {"autocast": partial(torch.autocast, "cpu", torch.float16)} if cast else {}
    policy = tiny_policy(dtype="float32")
    engine = Engine(policy.model, max_running=5, **how)
    run(engine)
    graphs = set(engine.forward._graphs._graphs.values())
    for parameter in policy.model.parameters():
        parameter.data = 1.5 * parameter.data + 0.01
    engine.new_weights(1)
    found = run(engine)
    assert not graphs & set(engine.forward._graphs._graphs.values())
    assert_same(found, run(Engine(policy.model, max_running=5, **how)), atol=1e-5)


def test_answers_that_grow_need_a_larger_buffer(device, monkeypatch):
    monkeypatch.setattr(graphs_module, "_LEAST_BYTES", 1)
    policy, asked = tiny_policy(dtype="float32"), make_requests(8, group_size=8, max_tokens=150, stop_token_ids=())
    forgets = []
    monkeypatch.setattr(Graphs, "forget", lambda self: forgets.append(self._graphs.clear()))
    found = answers(policy, asked)
    assert len(forgets) > 1
    monkeypatch.undo()
    assert_same(found, answers(policy, asked), atol=1e-4)


def test_a_larger_buffer_is_a_new_one_without_graphs():
    graphs = Graphs(inputs.Inputs(torch.device("cpu")))
    graphs._graphs[1, 1, 1] = "graph"  # type: ignore[assignment]
    first = graphs._room_for(100)
    assert graphs._room_for(len(first)) is first
    graphs._graphs[1, 1, 1] = "graph"  # type: ignore[assignment]
    assert len(graphs._room_for(len(first) + 1)) > len(first)
    assert not graphs._graphs
