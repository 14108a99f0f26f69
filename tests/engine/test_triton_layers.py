"""The kernels between products under Triton's interpreter, against torch. The interpreter has no bfloat16."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from rhymerl.engine.layer_steps import Heads, Norm, TorchSteps
from tests.engine.interpreted import Interpreter
from tests.products import values_first

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
SINGLE, HALF = torch.float32, torch.float16
EPSILON = 1e-5


@pytest.fixture(scope="module")
def kernels():
    names = ("add_rms_norm", "turn_and_store", "silu_times")
    running = {name: Interpreter(f"rhymerl.engine.triton_layers:{name}").__enter__() for name in names}
    yield running
    for each in running.values():
        each.__exit__()


def numbers(*shape, dtype=SINGLE):
    return torch.randn(shape).to(dtype)


def assert_close(found, expected):
    half = HALF in (found.dtype, expected.dtype)
    torch.testing.assert_close(
        found.double(), expected.double(), atol=8e-3 if half else 2e-6, rtol=1e-3 if half else 1e-6
    )


def side_by_side(tokens, *sizes, dtype):
    """Return slices of one product: what is of a token stands together, tokens are apart."""
    return numbers(tokens, sum(sizes), dtype=dtype).split(sizes, 1)


class Stored:
    """As a LayerStore."""

    def __init__(self, tokens: int, kv_heads: int, dim: int, keys: torch.dtype, values: torch.dtype) -> None:
        self.write_slots = torch.randperm(40)[:tokens]
        self.keys, self.values = (
            torch.zeros(41, kv_heads, dim, dtype=keys),
            torch.zeros(41, kv_heads, dim, dtype=values),
        )

    def write(self, keys, values):
        self.keys[self.write_slots], self.values[self.write_slots] = keys.to(self.keys.dtype), values


@pytest.mark.parametrize(
    ("tokens", "width", "dtypes"),
    values_first([1, 5], [64, 48, 1000], [(SINGLE, SINGLE), (SINGLE, HALF), (HALF, HALF)]),
)
def test_add_rms_norm(kernels, tokens, width, dtypes):
    of_hidden, of_products = dtypes
    hidden, change = numbers(tokens, width, dtype=of_hidden), numbers(tokens, width, dtype=of_products)
    weight = numbers(width, dtype=of_hidden)
    found = kernels["add_rms_norm"](hidden, change, weight, EPSILON)
    total = hidden + change.to(of_hidden)
    single = total.float()
    expected = weight.float() * single / (single.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    assert found.dtype == of_products
    assert_close(found, expected.to(of_products))
    assert torch.equal(kernels["add_rms_norm"].arguments[0], total), "the residual stays, with the change"


@pytest.mark.parametrize(
    ("shape", "dtypes", "normalises", "is_one_product"),
    values_first(
        [(4, 2, 16), (7, 1, 64), (3, 3, 24)],
        [(SINGLE, SINGLE), (HALF, SINGLE), (HALF, HALF)],
        [False, True],
        [False, True],
    ),
)
def test_turn_and_store(kernels, shape, dtypes, normalises, is_one_product):
    (heads, kv_heads, dim), (of_products, of_keys), tokens = shape, dtypes, 6
    sizes = [dim * each for each in (heads, kv_heads, kv_heads)]
    together = side_by_side(tokens, *sizes, dtype=of_products)
    query, key, value = ((each if is_one_product else each.contiguous()).view(tokens, -1, dim) for each in together)
    angles = torch.rand(tokens, dim // 2).repeat(1, 2) * 100
    cos, sin = angles.cos().to(of_keys), angles.sin().to(of_keys)
    there = Stored(tokens, kv_heads, dim, of_keys, of_products)
    weights = [numbers(dim, dtype=of_keys) for _ in range(2)]
    found = kernels["turn_and_store"](
        *(query, key, value, cos, sin, there.write_slots, there.keys, there.values),
        (*weights, EPSILON) if normalises else None,
    )
    keys, values = kernels["turn_and_store"].arguments[6:8]
    single = Stored(tokens, kv_heads, dim, SINGLE, SINGLE)
    single.write_slots = there.write_slots
    norms = None
    if normalises:
        modules = [torch.nn.RMSNorm(dim, eps=EPSILON) for _ in range(2)]
        for module, weight in zip(modules, weights, strict=True):
            module.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
        norms = tuple(Norm(module, module.weight, EPSILON) for module in modules)
    heads = Heads(*(each.float() for each in (query, key, value, cos, sin)))
    expected = TorchSteps().turn_and_store(single, norms, heads)
    assert (found.dtype, keys.dtype, values.dtype) == (of_keys, of_keys, of_products)
    assert_close(found, expected.to(of_keys))
    assert_close(keys, single.keys.to(of_keys))
    assert torch.equal(values, single.values.to(of_products)), "other slots stay as they are"


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("shape", [(1, 8), (7, 300), (2, 1024), (3, 1100)])
@pytest.mark.parametrize("is_one_product", [False, True])
def test_silu_times(kernels, dtype, shape, is_one_product):
    tokens, width = shape
    gate, up = side_by_side(tokens, width, width, dtype=dtype) if is_one_product else numbers(2, *shape, dtype=dtype)
    found = kernels["silu_times"](gate, up)
    assert_close(found, (torch.nn.functional.silu(gate.float()) * up.float()).to(dtype))


def test_what_is_not_finite_does_not_become_finite(kernels):
    hidden = torch.tensor([[1.0, float("nan")], [1.0, float("inf")]])
    assert not kernels["add_rms_norm"](hidden, torch.zeros(2, 2), torch.ones(2), EPSILON)[:, 1].isfinite().any()
    assert kernels["silu_times"](hidden, torch.ones(2, 2))[:, 1].isfinite().sum() == 0
