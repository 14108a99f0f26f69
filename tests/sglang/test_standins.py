"""The stand-ins of SGLang's CPU kernels against loops over nodes and slots; torch is all that these tests need."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

STANDINS = Path(__file__).parent / "standins"


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """The stand-in package, loaded from its file: it is on no path in the default run."""
    names = ("sgl_kernel", "sgl_kernel.speculative")
    before = {name: sys.modules.pop(name, None) for name in names}
    spec = importlib.util.spec_from_file_location(
        "sgl_kernel", STANDINS / "sgl_kernel/__init__.py", submodule_search_locations=[str(STANDINS / "sgl_kernel")]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["sgl_kernel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in names:
        del sys.modules[name]
    sys.modules.update({name: old for name, old in before.items() if old is not None})


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Parents of every request's nodes: -1 for node 0 and for orphans, and whatever hangs on an orphan."""
    n = draw(st.integers(1, 9))
    parents = st.tuples(*(st.just(-1) if node == 0 else st.integers(-1, node - 1) for node in range(n)))
    return [list(row) for row in draw(st.lists(parents, min_size=1, max_size=3))]


def ancestors_of(parents: list[int], node: int) -> set[int]:
    found = set()
    while (node := parents[node]) != -1:
        found.add(node)
    return found


def links(kernels: ModuleType, forest: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    """Return what the stand-in reads off the masks of a forest."""
    n = len(forest[0])
    masks = torch.zeros(len(forest), n, n, dtype=torch.bool)
    for row, parents in enumerate(forest):
        for node in range(n):
            masks[row, node, [node, *ancestors_of(parents, node)]] = True
    out = {name: torch.full((len(forest), n), -7) for name in ("index", "child", "sibling")}
    positions = torch.full((len(forest) * n,), -7)
    kernels.speculative.reconstruct_indices_from_tree_mask(
        masks.flatten(), torch.tensor(lengths), positions, *out.values(), len(forest), n
    )
    return {**out, "positions": positions}


@given(forest=forests(), data=st.data())
def test_links_are_those_of_the_parents(kernels: ModuleType, forest: list[list[int]], data: st.DataObject) -> None:
    n = len(forest[0])
    lengths = [data.draw(st.integers(1, 50)) for _ in forest]
    found = links(kernels, forest, lengths)
    for row, parents in enumerate(forest):
        for node in range(n):
            children = [other for other in range(n) if parents[other] == node]
            younger = [other for other in range(node + 1, n) if parents[other] == parents[node] != -1]
            assert found["index"][row, node] == row * n + node
            assert found["positions"][row * n + node] == lengths[row] + len(ancestors_of(parents, node))
            assert found["child"][row, node] == (children[0] if children else -1)
            assert found["sibling"][row, node] == (younger[0] if younger else -1)


@settings(max_examples=300)
@given(forest=forests(), data=st.data())
def test_verification_follows_the_target_and_never_reaches_an_orphan(
    kernels: ModuleType, forest: list[list[int]], data: st.DataObject
) -> None:
    shape = (len(forest), len(forest[0]))
    few = st.lists(st.integers(0, 2), min_size=shape[1], max_size=shape[1])
    tokens, targets = ([data.draw(few) for _ in forest] for _ in range(2))
    found = links(kernels, forest, [5] * shape[0])
    predicts, accepted = torch.full((shape[0] * shape[1],), -7), torch.full(shape, -1)
    counts = torch.full((shape[0],), -7)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=counts,
        candidates=torch.tensor(tokens),
        retrive_index=found["index"],
        retrive_next_token=found["child"],
        retrive_next_sibling=found["sibling"],
        target_predict=torch.tensor(targets),
    )
    for row, parents in enumerate(forest):
        path = [0]
        while hits := [
            node
            for node, parent in enumerate(parents)
            if parent == path[-1] and tokens[row][node] == targets[row][parent]
        ]:
            path.append(hits[0])
        first = row * shape[1]
        assert accepted[row].tolist() == [first + node for node in path] + [-1] * (shape[1] - len(path))
        assert counts[row] == len(path) - 1
        expected = [targets[row][node] if node in path else -7 for node in range(shape[1])]
        assert predicts[first : first + shape[1]].tolist() == expected


@given(
    ranges=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=4),
    order=st.permutations(range(5)),
)
def test_slots_are_gathered_and_scattered_by_request(
    kernels: ModuleType, ranges: list[tuple[int, int]], order: list[int]
) -> None:
    table = torch.arange(50, dtype=torch.int32).view(5, 10)
    starts, lengths = (torch.tensor(column) for column in zip(*ranges, strict=True))
    rows = torch.tensor(order[: len(ranges)])
    expected = [
        row * 10 + start + offset
        for row, (start, length) in zip(rows.tolist(), ranges, strict=True)
        for offset in range(length)
    ]
    gathered = torch.full((len(expected) + 2,), -1)
    kernels.assign_extend_cache_locs_cpu(rows, table, starts, starts + lengths, gathered, 10)
    assert gathered.tolist() == [*expected, -1, -1]

    written = torch.full_like(table, -1)
    kernels.assign_req_to_token_pool_cpu(rows, written, starts, starts + lengths, gathered, 10)
    assert torch.equal(written, torch.where(torch.isin(table, torch.tensor(expected)), table, -1))


def test_slots_of_accepted_nodes_move_to_the_front(kernels: ModuleType) -> None:
    out = torch.zeros(6, dtype=torch.int64)
    index = torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32)
    kernels.fill_accept_out_cache_loc_cpu(index, torch.arange(10, 16), out)
    assert out.tolist() == [10, 12, 13, 0, 0, 0]


def test_copied_slots_are_read_before_any_is_written(kernels: ModuleType) -> None:
    buffers = [torch.arange(12.0).view(6, 2), torch.arange(18, dtype=torch.bfloat16).view(6, 3)]
    before = [buffer.clone() for buffer in buffers]
    source, target = torch.tensor([1, 2, 5]), torch.tensor([2, 3, 1])
    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers]), torch.tensor([8, 6]), target, source
    )
    for buffer, old in zip(buffers, before, strict=True):
        expected = old.clone()
        expected[target] = old[source]
        assert torch.equal(buffer, expected)
