"""What the GPU itself does: bytes a second of a copy on it, and operations a second of a matrix product in bfloat16.

A copy counts the bytes that it reads and those that it writes. The product is of two square matrices of random numbers.

    python -m benchmarks.gpu.machine
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import record
from benchmarks.gpu.device_time import device, milliseconds

PACKAGES = ("torch", "triton", "transformers", "numba", "sglang")


def measure(arguments: Any, gpu: str) -> dict[str, Any]:
    source = torch.zeros(arguments.copy_mib * 2**20, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    sides = [
        torch.randn(arguments.matrix, arguments.matrix, device=device()).to(torch.bfloat16) for _ in ("left", "right")
    ]
    times = {
        "copy": milliseconds(lambda: target.copy_(source), repeats=arguments.repeats, calls=3),
        "product": milliseconds(lambda: torch.mm(*sides), repeats=arguments.repeats, calls=3),
    }
    of_gpu = {}
    if device() == "cuda":
        of_gpu = {"memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)}
    return {
        **of_gpu,
        "copy_tb_s": record.spread(2 * source.nbytes / ms / 1e9 for ms in times["copy"]),
        "bf16_tflop_s": record.spread(2 * arguments.matrix**3 / ms / 1e9 for ms in times["product"]),
        **record.versions(PACKAGES),
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = record.begin(record.options(__doc__, repeats=10, copy_mib=2048, matrix=8192), words)
    name = torch.cuda.get_device_name() if device() == "cuda" else "none"
    rows = record.rows_of([{"gpu": name}], partial(measure, arguments))
    return record.finish("gpu_machine", __doc__, arguments, rows=rows)


if __name__ == "__main__":
    main()
