"""Compile numba code of engine, drafter and update on the CPU: `gpu.py` does it while the first parts use the GPU.

numba's cache is one processor's, so that it cannot be brought along. A tiny policy in bfloat16 takes the same path on a
CPU as on a GPU.

    python -m benchmarks.gpu.warm
"""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks

from benchmarks.gpu import drafts as gpu_drafts
from benchmarks.gpu import engine as gpu_engine
from benchmarks.gpu import update as gpu_update

TINY = ("--size", "tiny", "--threads", "1", "--tokens", "24")


def main() -> None:
    gpu_engine.main([*TINY, "--dtype", "bfloat16", "--running", "1", "8", "--nodes", "0", "4", "--passes", "8"])
    gpu_drafts.main([*TINY, "--dtype", "bfloat16", "--running", "16"])
    gpu_update.main([*TINY, "--samples", "16", "--repeats", "1"])


if __name__ == "__main__":
    main()
