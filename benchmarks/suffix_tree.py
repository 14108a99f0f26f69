"""Index and drafts on near-copies, side by side with the suffix tree of arctic-inference.

From a base of --tokens tokens, --answers copies with 8 % edits are indexed; each of 64 further copies asks for a draft of
16 tokens after every fourth token. Ours drafts from the earlier answers, the request's own text and the running siblings, in batches of 64;
the other one from its tree over the earlier answers and one over the request, request by request. Times are medians.

    pip install --no-deps --target FOLDER arctic-inference
    python benchmarks/suffix_tree.py --arctic FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import record

from rhymerl.bench.drafter import DrafterBench
from rhymerl.config import compose

_NODES, _STRIDE = 16, 4


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=7)
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--arctic", type=Path, help="folder in which arctic-inference is installed")
    arguments = parser.parse_args(words)
    start = record.environment()
    sizes = [f"{name}={getattr(arguments, name)}" for name in ("answers", "tokens", "repeats", "seed")]
    bench = DrafterBench(compose("bench_drafter", [*sizes, f"nodes={_NODES}"]))
    row = bench.run()["rows"][0]
    names = ("build_us_per_token", "bytes_per_token", "propose_us", "nodes", "drafts_with_12_nodes")
    rows = [{"index": "rhymerl", **{name: float(f"{row[name]:.3g}") for name in names}}]
    if arguments.arctic is not None:
        sys.path.append(str(arguments.arctic))
        rows.append({"index": "arctic-inference", **arctic(bench, arguments)})
    arguments.arctic = arguments.arctic is not None
    return record.finish("suffix_tree", __doc__, arguments, rows=rows, start=start)


def arctic(bench: DrafterBench, arguments: Any) -> dict[str, float]:
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    answers = [bench.copy() for _ in range(arguments.answers)]
    before = resident_bytes()
    cache = SuffixDecodingCache(max_tree_depth=64)
    started = time.perf_counter()
    for number, answer in enumerate(answers):
        cache.start_request(number, answer[:1])
        cache.add_active_response(number, answer)
        cache.stop_request(number)
    built = time.perf_counter() - started
    num_tokens = arguments.answers * arguments.tokens
    seconds, nodes = [], []
    query = bench.copy()
    cache.start_request("query", query[:200])
    for length in range(200, arguments.tokens, _STRIDE):
        started = time.perf_counter()
        draft = cache.speculate(
            "query",
            query[:length],
            max_spec_tokens=_NODES,
            max_spec_offset=_NODES,
            min_token_prob=0.0,
            use_tree_spec=True,
        )
        seconds.append(time.perf_counter() - started)
        nodes.append(len(draft.token_ids))
        cache.add_active_response("query", query[length : length + _STRIDE])
    figures = {
        "build_us_per_token": 1e6 * built / num_tokens,
        "bytes_per_token": (resident_bytes() - before) / num_tokens,
        "propose_us": 1e6 * float(np.median(seconds)),
        "nodes": float(np.mean(nodes)),
        "drafts_with_12_nodes": float(np.mean(np.array(nodes) >= 12)),
    }
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
