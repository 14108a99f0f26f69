"""The kernels, compiled for GPUs, which needs none: the interpreter takes code that a GPU's compiler refuses."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.products import pairs_first

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

_HOPPER = 90
_TYPES = {
    "stride": "i64",
    "vocabulary": "i32",
    "chunk": "i32",
    "num_splits": "i32",
    "counters": "*i64",
    "inverse_temperatures": "*fp32",
    "logprob_scales": "*fp32",
    "temperatures": "*fp32",
    "top_ks": "*i64",
    "top_ps": "*fp32",
    "min_ps": "*fp32",
    "cutoffs": "*i32",
    "winners": "*i32",
    "norms": "*fp32",
    "out": "*i64",
    "logprobs": "*fp32",
}

_TYPES |= {"tiles": "*i32", "positions": "*i64", "ancestors": "*i64", "kv_slots": "*i32", "scale": "fp32"}
_TYPES |= {"parts": "*fp32", "sums": "*fp32", "sinks": "*bf16"}
_TYPES |= {"slots": "*i64", "epsilon": "fp32", "heads": "i32", "width": "i32"}
_TYPES |= dict.fromkeys(("query_stride", "key_stride", "value_stride", "gate_stride", "up_stride"), "i32")
_OF_LAYERS = (
    "hidden",
    "change",
    "weight",
    "query",
    "key",
    "value",
    "cos",
    "sin",
    "keys",
    "values",
    "turned",
    "gate",
    "up",
    "out",
)
_STATES = ("query", "keys", "values", "out")


# What the embedded engine passes; SGLang has the ones above.
_OF_ENGINE = dict.fromkeys(("inverse_temperatures", "logprob_scales", "temperatures", "top_ps", "min_ps"), "*fp64")
OWNERS = pytest.mark.parametrize("owner", [{}, _OF_ENGINE], ids=["sglang", "embedded"])


def compiled(
    kernel: Any,
    dtype: str,
    capability: int,
    owner: dict[str, str],
    *,
    num_warps: int,
    num_stages: int = 3,
    aligned: bool = False,
    **constants: Any,
) -> dict[str, Any]:
    """Return what a kernel becomes for logits of this dtype on a GPU of this capability, by the name of each form.

    With `aligned` it knows that what pointers point at begins at multiples of 16 bytes, as it does when tensors are
    given.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    types = {**_TYPES, "logits": f"*{dtype}", **dict.fromkeys(_STATES, f"*{dtype}"), **owner}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    pointers = [n for n, name in enumerate(kernel.arg_names) if signature[name].startswith("*")] if aligned else []
    attributes = {(n,): [["tt.divisibility", 16]] for n in pointers}
    source = triton.compiler.ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm


def stack_bytes(binary: bytes, folder: Path) -> int:
    """Return what a thread keeps in memory because its registers are too few, or because it has arrays."""
    from triton import knobs

    file = folder / "kernel.cubin"
    file.write_bytes(binary)
    words = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", said)))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@OWNERS
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("truncates", [False, True], ids=["clean", "truncated"])
def test_the_race(dtype: str, owner: dict[str, str], truncates: bool, tmp_path: Path) -> None:
    from rhymerl.engine import triton_draw

    rules = {} if truncates else {"temperatures": None, "cutoffs": None}
    constants = {"truncates": truncates, "fast": True, "block": triton_draw._BLOCK, **rules}
    found = compiled(triton_draw._race, dtype, _HOPPER, owner, num_warps=4, **constants)
    assert "lg2.approx.f32" in found["ptx"]
    assert stack_bytes(found["cubin"], tmp_path) == 0


@OWNERS
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_choice_among_splits(dtype: str, owner: dict[str, str], tmp_path: Path) -> None:
    from rhymerl.engine import triton_draw

    found = compiled(triton_draw._finish, dtype, _HOPPER, owner, num_warps=1, width=triton_draw._MOST_SPLITS.value)
    assert stack_bytes(found["cubin"], tmp_path) == 0


@OWNERS
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_cut(dtype: str, owner: dict[str, str], tmp_path: Path) -> None:
    from rhymerl.engine import triton_truncation

    found = compiled(triton_truncation._cut, dtype, _HOPPER, owner, num_warps=16, block=triton_truncation._BLOCK)
    assert stack_bytes(found["cubin"], tmp_path) == 0


_PLAIN = {"splits": 1, "sums": None, "window": None, "softcap": None, "sinks": None}
_LAYERS = {
    "full": _PLAIN,
    "window": {**_PLAIN, "window": 4096},
    "all": {"splits": 16, "window": -8192, "softcap": 50.0},
}


@pytest.mark.parametrize(
    ("dtype", "heads", "widest", "owner", "layer"),
    pairs_first(
        ["fp32", "bf16"],
        [(1, 128), (7, 64), (7, 128), (2, 256)],
        [1, 17],
        {"alike": {}, "autocast": {"query": "*fp32", "keys": "*fp32"}},
        _LAYERS,
    ),
)
def test_attention(
    dtype: str, heads: tuple[int, int], widest: int, owner: dict[str, str], layer: dict[str, Any], tmp_path: Path
) -> None:
    """Nothing of a tile is kept in memory, but for some numbers of the widest heads in float32.

    Under autocast rotated queries and keys stay float32.
    """
    import torch

    from rhymerl.engine import triton_attention

    groups, dim = heads
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    most = triton_attention.tokens_of_a_tile(groups, kind, widest=widest)
    of_keys = torch.float32 if "keys" in owner else kind
    block, num_warps = triton_attention.block_and_warps(kind, of_keys, dim, is_plain=layer is _PLAIN)
    sizes = {
        "groups": groups,
        "kv_heads": 4,
        "dim": dim,
        "padded_dim": dim,
        "most": most,
        "block": block,
    }
    padded = 1 << (groups - 1).bit_length()
    precision = "ieee" if dtype == "fp32" else None
    how = {"padded_groups": padded, "precision": precision, **layer}
    owner = owner if layer["splits"] == 1 else {**owner, "out": "*fp32"}
    options = {"num_warps": num_warps, "num_stages": 2, "aligned": True}
    found = compiled(triton_attention._attend, dtype, _HOPPER, owner, **options, **sizes, **how)
    assert ("mma" in found["ptx"]) == (dtype == "bf16")
    assert stack_bytes(found["cubin"], tmp_path) <= (32 if (dtype, dim) == ("fp32", 256) else 0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_merge_of_parts(dtype: str, tmp_path: Path) -> None:
    from rhymerl.engine import tiles, triton_attention

    sizes = {"dim": 256, "padded_dim": 256, "splits": tiles._MOST_SPLITS}
    found = compiled(triton_attention._merge, dtype, _HOPPER, {}, num_warps=1, aligned=True, **sizes)
    assert stack_bytes(found["cubin"], tmp_path) == 0


# Products in bfloat16 beside a residual, angles and keys in float32.
_AUTOCAST = dict.fromkeys(("hidden", "weight", "cos", "sin", "keys", "turned"), "*fp32")
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "owner"), [("fp32", {}), ("bf16", {}), ("bf16", _AUTOCAST)], ids=["float32", "bfloat16", "autocast"]
)


@PRECISIONS
@pytest.mark.parametrize("width", [896, 5120, 8192])
def test_a_norm(dtype: str, owner: dict[str, str], width: int, tmp_path: Path) -> None:
    from rhymerl.engine import triton_layers

    block = 1 << (width - 1).bit_length()
    how = {"num_warps": triton_layers.warps_for(block), "width": width, "block": block, "aligned": True}
    types = {**dict.fromkeys(_OF_LAYERS, f"*{dtype}"), **owner}
    found = compiled(triton_layers._add_rms_norm, dtype, _HOPPER, types, **how)
    assert stack_bytes(found["cubin"], tmp_path) == 0


@PRECISIONS
@pytest.mark.parametrize(("dim", "normalises"), [(64, False), (80, True), (128, True)])
def test_turning(dtype: str, owner: dict[str, str], dim: int, normalises: bool, tmp_path: Path) -> None:
    from rhymerl.engine import triton_layers

    types = {**dict.fromkeys(_OF_LAYERS, f"*{dtype}"), **owner}
    types |= dict.fromkeys(("query_weight", "key_weight"), types["cos"])
    padded = 1 << (dim // 2 - 1).bit_length()
    sizes = {"heads": 28, "kv_heads": 4, "dim": dim, "padded_half": padded, "normalises": normalises}
    found = compiled(triton_layers._turn_and_store, dtype, _HOPPER, types, num_warps=1, aligned=True, **sizes)
    assert stack_bytes(found["cubin"], tmp_path) == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_gate_of_an_mlp(dtype: str, tmp_path: Path) -> None:
    from rhymerl.engine import triton_layers

    types = dict.fromkeys(_OF_LAYERS, f"*{dtype}")
    how = {"num_warps": 4, "block": triton_layers._BLOCK, "aligned": True}
    found = compiled(triton_layers._silu_times, dtype, _HOPPER, types, **how)
    assert stack_bytes(found["cubin"], tmp_path) == 0
