"""Time of whole GRPO steps with SGLang, drafts from history against none: four epochs over the same prompts.

The policy has random weights of a size, whose head is sure of few tokens, and hardly changes (learning rate 1e-9), so
that epochs repeat as in `sglang_throughput.py`. The update is as long as with any weights. One run a drafter, one after
another.

`--running` is the answers of a step, `--minutes` are for all runs, and `--server` and `--environment` are further
arguments (KEY=VALUE) and variables (NAME=VALUE) of SGLang.

    python -m benchmarks.gpu.steps --size 0.5B
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.gpu.peaked_policy import SIZES, peaked_policy

EPOCHS, STEPS_AN_EPOCH = 4, 2


def settings(arguments: Any, policy: Path, drafter: str) -> list[str]:
    prompts = arguments.running // arguments.group_size
    engine = [f"+backend.arguments.{word}" for word in arguments.server]
    variables = [f"+backend.environment.{word}" for word in arguments.environment]
    return [
        f"model.path={policy}",
        f"drafter={drafter}",
        f"seed={arguments.seed}",
        "backend=sglang",
        "backend.dtype=bfloat16",
        f"backend.max_running={arguments.running}",
        f"backend.nodes={0 if drafter == 'none' else arguments.nodes}",
        *engine,
        *variables,
        "deterministic=false",
        "rewards={coin: benchmarks.gpu.coin_reward.coin}",
        "budget=goodput",
        f"data.prompts_per_step={prompts}",
        f"task.train_size={STEPS_AN_EPOCH * prompts}",
        f"rollout.group_size={arguments.group_size}",
        f"rollout.max_tokens={arguments.max_tokens}",
        "update.learning_rate=1e-9",
        "update.warmup_steps=0",
        "update.micro_batch_tokens=8192",
        "trainer.precision=bf16-mixed",
        f"trainer.max_steps={EPOCHS * STEPS_AN_EPOCH}",
        "trainer.limit_val_batches=0",
        "checkpoint.every_n_steps=1000",
    ]


def run(arguments: Any, policy: Path, drafter: str, ends: float) -> dict[str, Any]:
    """A row of the summary of one run."""
    words = settings(arguments, policy, drafter)
    try:
        with record.fitted("--config", "quickstart", *words, timeout_s=max(ends - time.monotonic(), 1.0)) as run_dir:
            found = json.loads((run_dir / "summary.json").read_text())
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"drafter={drafter}: not over within --minutes={arguments.minutes:g}") from error
    steps = found["steps"]
    row = {
        "drafter": drafter,
        "steps": steps,
        "rollout_s": round(found["rollout_s"] / steps, 3),
        "update_s": round(found["update_s"] / steps, 3),
        "tokens_per_s": round(found["rollout_tokens_per_s"]),
        "accept_length": round(found["spec_accept_length"] or 1.0, 3),
    }
    record.note_row(row)
    return row


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(
        __doc__, running=128, group_size=8, max_tokens=256, nodes=16, minutes=10.0, server=[], environment=[]
    )
    parser.add_argument("--size", choices=list(SIZES), default="0.5B")
    arguments = record.begin(parser, words)
    ends = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="rhymerl-policy-") as folder:
        peaked_policy(arguments.size, dtype="float32", seed=arguments.seed).save(Path(folder))
        rows = [run(arguments, Path(folder), drafter, ends) for drafter in ("none", "history_tree")]
    return record.finish("gpu_steps", __doc__, arguments, rows=rows)


if __name__ == "__main__":
    main()
