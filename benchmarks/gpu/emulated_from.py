"""A file for an `EmulatedBackend` from measured passes of a card: the rows of `passes.py` that `make gpu` has written.

What a pass costs is its replayed graph, and `--overhead-ms` for what an engine does beside it. Beyond the largest
measured pass a token costs what it costs there on average, which is too much: larger passes use a card better. What a
key costs is derived: its bytes over the rate of a copy on the card, which the row of `machine.py` has. `source` says
all of it.

    python -m benchmarks.gpu.emulated_from benchmarks/results/gpu_h100.jsonl --size 7B > h100_7b.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import Attempt, attempts_in


def emulated(file: Path, size: str, *, card: str | None = None, overhead_ms: float = 0.0) -> dict[str, Any]:
    """Return the file's content by the newest row. Raises ValueError if rows are missing or of several cards."""
    tried = [each for each in attempts_in(file) if card in (None, each.card)]
    cards = sorted({each.card for each in tried if each.part == "passes" and each.rows})
    if len(cards) != 1:
        raise ValueError(f"{file}: expected passes of one card, found {cards}; --card chooses")
    passes = rows_of(tried, "passes", cards[0])
    by_tokens = {row["tokens"]: row for row in passes if row["size"] == size}
    if len(by_tokens) < 2:
        raise ValueError(
            f"{file}: expected passes of {size} at two numbers of tokens at least, found {sorted(by_tokens)}"
        )
    machine = rows_of(tried, "machine", cards[0])
    if not machine:
        raise ValueError(f"{file}: expected the part machine of {cards[0]}, which has the rate of a copy")
    tokens = sorted(by_tokens)
    # A pass over more tokens may be measured as a little shorter; a curve that falls is refused by whoever reads it.
    milliseconds = list(accumulate((by_tokens[count]["pass_ms"]["median"] + overhead_ms for count in tokens), max))
    curve = [*zip(tokens, milliseconds, strict=True), (2 * tokens[-1], 2 * milliseconds[-1])]
    rate, kv_bytes = machine[-1]["copy_tb_s"]["median"], by_tokens[tokens[0]]["kv_bytes_per_token"]
    beside = f"{overhead_ms:g} ms a pass for what an engine does beside it" if overhead_ms else "nothing beside it"
    return {
        "source": (
            f"measured on {cards[0]}: forward passes of Qwen2.5 {size} in bfloat16 with random weights, replayed from a CUDA graph, and {beside}; "
            f"derived: keys and values of {kv_bytes} bytes a token, read at the {rate:g} TB/s of a copy, "
            f"and passes over more than {tokens[-1]} tokens, in proportion to that one"
        ),
        "costs": [[count, float(f"{ms / 1e3:.4g}")] for count, ms in curve],
        "context_s_per_token": float(f"{kv_bytes / rate / 1e12:.3g}"),
    }


def rows_of(tried: Sequence[Attempt], part: str, card: str) -> list[dict[str, Any]]:
    """Return all rows of a part on a card, the newest last."""
    return [row for each in tried if (each.part, each.card) == (part, card) for row in each.rows]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="gpu_<hardware>.jsonl")
    parser.add_argument("--size", default="7B")
    parser.add_argument("--card", help="where the file has passes of several")
    parser.add_argument("--overhead-ms", type=float, default=0.0, help="of each pass (0)")
    arguments = parser.parse_args(words)
    try:
        found = emulated(arguments.file, arguments.size, card=arguments.card, overhead_ms=arguments.overhead_ms)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
