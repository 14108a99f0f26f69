"""A reward that tells answers apart and means nothing, so that every step has an update."""

from __future__ import annotations

import zlib


def coin(completion: str, **columns: object) -> float:
    """0 or 1, by a checksum of the text."""
    return float(zlib.crc32(completion.encode()) % 2)
