"""Three steps of the quickstart with `trainer.strategy=fsdp2` on one GPU: sharding runs there, no speed is shown.

One rank holds all shards, over NCCL on a GPU and gloo on a CPU; the embedded engine answers with a whole copy of the
weights. Further settings follow the options.

    python -m benchmarks.gpu.fsdp2 -- trainer.max_steps=5
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks import record

SETTINGS = (
    *("trainer.strategy=fsdp2", "trainer.devices=1", "trainer.max_steps=3", "trainer.limit_val_batches=0"),
    *("backend.whole_copy=true", "report=false", "logger=null"),
)
SHOWN = ("steps", "rollout_s", "update_s", "rollout_tokens_per_s")


def run(settings: Sequence[str]) -> dict[str, Any]:
    """Return what the run's summary says."""
    with record.fitted("--config", "quickstart", *SETTINGS, *settings) as run_dir:
        found = json.loads((run_dir / "summary.json").read_text())
    return {name: found[name] for name in SHOWN}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = record.begin(record.options(__doc__, settings=True), words)
    rows = record.rows_of([{"strategy": "fsdp2", "ranks": 1}], lambda **_: run(arguments.settings))
    return record.finish("gpu_fsdp2", __doc__, arguments, rows=rows)


if __name__ == "__main__":
    main()
