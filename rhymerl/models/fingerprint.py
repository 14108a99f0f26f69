"""The fingerprint of a model: 32 hex digits that change with any weight, made of one tensor after another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_BYTES = 2**15


def fingerprint(model: nn.Module) -> str:
    """Return 32 hex digits of names, shapes and sums over bits, by 32 KiB: any weight changes them (0.1 s a GB)."""
    return fingerprint_of((name, weight, summary(weight)) for name, weight in model.state_dict().items())


def fingerprint_of(found: Iterable[tuple[str, Tensor, bytes]]) -> str:
    """Return the fingerprint of a state dict's names, tensors (for shapes and dtypes), and their summaries."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight, content in found:
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def summary(weight: Tensor) -> bytes:
    """Return the sums over a tensor's bits, and what is left of them."""
    content = weight.detach().reshape(-1).view(torch.uint8)
    whole = len(content) // _BYTES * _BYTES
    rest = content[whole:].cpu().numpy().tobytes()
    if not whole:
        return rest
    words = content[:whole].clone() if content.storage_offset() % 8 else content[:whole]
    sums = words.view(torch.int64).view(-1, _BYTES // 8).sum(1)
    return sums.cpu().numpy().tobytes() + rest
