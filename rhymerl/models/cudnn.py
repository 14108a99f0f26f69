"""Attention without cuDNN, which torch prefers on newer GPUs.

cuDNN makes a plan for each shape, and our shapes seldom repeat. A plan took some 70 ms where the attention of a layer
took 6 microseconds (H200, torch 2.11, 0.5B).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Context in which torch's attention avoids cuDNN.

    The choice is the whole process's: of two overlapping threads, one may leave it to the other.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
