"""The kernel of attention under Triton's interpreter, against the plan of a CPU. The interpreter has no bfloat16."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

from rhymerl.drafts import Draft, DraftBatch, no_drafts
from rhymerl.engine.layout import PassLayout, lay_out_pass
from rhymerl.engine.rows import Rows, SlotPool
from rhymerl.engine.tiles import TileLayout, tile
from rhymerl.models.attention import LayerAttention
from tests.engine.interpreted import Interpreter
from tests.engine.test_windows import plan_of
from tests.products import values_first

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
PATH = list(range(-1, 62))  # as many nodes as there are bits
TREE = [-1, 0, 0, 1, -1, 4, 3]


@pytest.fixture(scope="module")
def kernel():
    with Interpreter("rhymerl.engine.triton_attention:attend") as interpreter:
        yield interpreter


def laid_out(source, rows: list[tuple[int, int, list[int]]], most: int) -> tuple[PassLayout, TileLayout]:
    """Lay out rows that have so many keys and feed so many tokens with a draft tree; slots are in no order."""
    before, chain = (np.array(each) for each in list(zip(*rows, strict=True))[:2])
    trees = [np.array(parents, int) for _, _, parents in rows]
    num_slots = int((before + chain).sum()) + sum(map(len, trees))
    table = Rows(len(rows), int((before + chain).max()) + 63, SlotPool(num_slots))
    table.pool.give(source.permutation(table.pool.take(num_slots)))
    row = np.array([table.enter_prefix(np.zeros(length, np.int32)).row for length in before + chain])
    has_keys = before > 0
    lay_out_pass(table, row[has_keys], before[has_keys], np.empty(0, int), no_drafts(0))
    table.cached[row] = before
    drafts = DraftBatch.pack([Draft(token_ids=np.zeros(len(each), int), parents=each) for each in trees])
    emits = np.arange(len(row))
    layout = lay_out_pass(table, row, chain, emits, drafts)
    tiles = tile(table, row, chain, layout.width, emits, drafts, most=most)
    assert tiles is not None
    return layout, tiles


def call(kernel, tensors, layout: PassLayout, tiles: TileLayout, layer: LayerAttention, splits: int = 1):
    """Attend by the kernel, with two tiles of nothing at the end."""
    padded = np.pad(tiles.tiles, ((0, 2), (0, 0)))
    arrays = map(torch.from_numpy, (padded, layout.positions, tiles.ancestors, tiles.kv_slots))
    how = {"window": layer.window, "softcap": layer.softcap, "sinks": layer.sinks}
    return kernel(*tensors, *arrays, scale=0.3, most=tiles.most, splits=splits, **how)


def numbers(source, layout: PassLayout, tiles: TileLayout, shape: tuple[int, int, int], dtype=torch.float32):
    """Return a query, keys and values."""
    heads, kv_heads, dim = shape
    sizes = (layout.num_tokens, heads, dim), *[(len(tiles.kv_slots), kv_heads, dim)] * 2
    return [torch.from_numpy(source.normal(size=size)).to(dtype) for size in sizes]


def assert_as_planned(kernel, rows, shape, most: int, dtype, layer: LayerAttention, splits: int = 1) -> None:
    source = np.random.default_rng(shape[2] + most)
    layout, tiles = laid_out(source, rows, most)
    tensors = numbers(source, layout, tiles, shape, dtype)
    found = call(kernel, tensors, layout, tiles, layer, splits)
    expected = plan_of(layout).attend(*(each.double() for each in tensors), 0.3, layer)
    torch.testing.assert_close(found.double(), expected, atol=1e-5 if dtype == torch.float32 else 4e-3, rtol=0)


def random_tree(seed: int, size: int) -> list[int]:
    source = np.random.default_rng(seed)
    return [int(source.integers(max(node - 3, -1), node)) for node in range(size)]


def layer_of(window: int | None = None, *, sinks: int = 0, **more: Any) -> LayerAttention:
    own = torch.linspace(-2, 3, sinks) if sinks else None
    return LayerAttention(window=window, sinks=own, **more)


@pytest.mark.parametrize(
    ("shape", "most", "dtype", "splits", "has_sinks"),
    values_first(
        [(4, 4, 16), (6, 2, 24), (7, 1, 64)], [8, 2], [torch.float32, torch.float16], [1, 2, 8], [False, True]
    ),
)
def test_it_is_softmax_over_what_a_token_sees(kernel, shape, most, dtype, splits, has_sinks):
    rows = [
        (0, 1, []),
        (63, 1, TREE),  # the root is the last key of a block
        (64, 9 * most, [-1, -1]),
        (130, 3, []),
    ]
    assert_as_planned(kernel, rows, shape, most, dtype, layer_of(sinks=has_sinks * shape[0]), splits)


# A path of 63 nodes hangs below the position 5, and a tree of some levels below 140.
WINDOWS = [1, 5, 63, 64, 70, 140, -3, -64, -69]
KINDS = [{}, {"softcap": 1.5}, {"sinks": True}, {"softcap": 0.7, "sinks": True}]
SHAPES = [(2, 1, 16), (3, 1, 64), (5, 1, 64), (8, 1, 64), (2, 2, 128), (2, 1, 256)]


@pytest.mark.parametrize(
    ("window", "shape", "kind", "splits"),
    values_first([*WINDOWS, 500, -500, None], SHAPES, KINDS, [1, 4]),
)
def test_a_layer_has_what_it_says(kernel, window, shape, kind, splits):
    layer = layer_of(window, **{**kind, "sinks": shape[0] if "sinks" in kind else 0})
    rows = [(5, 1, PATH), (138, 3, random_tree(shape[2], 12))]
    assert_as_planned(kernel, rows, shape, 16, torch.float32, layer, splits)


LONG = [None, 16, 1023, 1024, 1025, 3990, -1000, -4001]


@pytest.mark.slow
@pytest.mark.parametrize("length", [900, 4000])
@pytest.mark.parametrize(("seed", "window"), list(enumerate(LONG)))
def test_rows_are_long(kernel, length, seed, window):
    rows = [(length - seed, 1 + seed, random_tree(seed, 63)), (length // 3, 2, PATH)]
    kind = KINDS[seed % 4]
    layer = layer_of(window, **{**kind, "sinks": 4 if "sinks" in kind else 0})
    assert_as_planned(kernel, rows, (4, 2, 64), 16, torch.float32, layer, splits=8 >> seed // 2)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [3, 64, -50])
def test_keys_before_a_window_are_not_read(kernel, window, splits):
    """They may have been freed since; a value that is no number would stay one with a weight of 0."""
    source = np.random.default_rng(0)
    layout, tiles = laid_out(source, [(200, 1, [])], 4)
    query, keys, values = numbers(source, layout, tiles, (2, 1, 16))
    oldest = 200 if window < 0 else 201 - window
    for each in (keys, values):
        each[torch.from_numpy(tiles.kv_slots[:oldest]).long()] = float("nan")
    layer = LayerAttention(window=window)
    assert call(kernel, (query, keys, values), layout, tiles, layer, splits).isfinite().all()
    values[int(tiles.kv_slots[oldest])] = float("nan")
    assert call(kernel, (query, keys, values), layout, tiles, layer, splits).isnan().all()


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_become_finite(kernel, value, splits):
    source = np.random.default_rng(0)
    layout, tiles = laid_out(source, [(3, 1, [])], 8)
    query, keys = torch.full((1, 2, 16), value), torch.ones(4, 2, 16)
    assert not call(kernel, (query, keys, keys), layout, tiles, LayerAttention(), splits).isfinite().any()


@pytest.mark.parametrize("groups", [1, 2, 3, 7, 8, 16, 71])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tile_has_as_many_lines_as_a_product_needs(groups, dtype):
    from rhymerl.engine.triton_attention import tokens_of_a_tile

    padded = 1 << (groups - 1).bit_length()
    for widest in (1, 2, 17, 5000):
        assert 16 <= padded * tokens_of_a_tile(groups, dtype, widest=widest) <= max(64, padded)


@pytest.mark.parametrize(
    ("longest", "programs", "processors", "splits"),
    [
        (1024, 4, 132, 16),  # a tile and 4 key heads
        (1024, 8, 132, 16),
        (1024, 16, 132, 8),
        (9000, 64, 132, 2),
        (9000, 128, 132, 1),
        (9000, 4096, 132, 1),
        (1023, 4, 132, 1),
        (9000, 4, 0, 1),  # no GPU
    ],
)
def test_keys_are_split_where_few_programs_meet_long_rows(longest, programs, processors, splits):
    _, tiles = laid_out(np.random.default_rng(0), [(3, 1, []), (longest - 1, 1, [])], 8)
    assert tiles.splits(programs, processors) == splits
