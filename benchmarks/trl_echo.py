"""A training step of rhymerl and of TRL's GRPOTrainer on the same work, and what each learns from it.

The echo task (echo_task.py) with a Qwen2 of 64 x 2 layers from the same random weights, 8 prompts x 8 answers x at
most 32 tokens (an answer ends early at its end token only), one optimizer step a rollout, the same learning rate,
AdamW and gradient clipping, TensorBoard every step. Each seed is a block of two processes, one a side, in
alternating order. A step is timed from the end of one to the end of the next, so data, reward and logging
are in it; `other_s` is what is neither generation nor update. The first --warm-up steps are not timed.
Spreads are over the seeds; `speedup` is TRL's step time over ours, seed by seed.

    python benchmarks/trl_echo.py --trl-python PYTHON_WITH_TRL [--steps 100] [--seeds 3]

TRL has its own requirements, so give it its own environment (pip install trl datasets tensorboard). Without
--trl-python our side runs alone, and `speedup` is null.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import echo_task
import record

from rhymerl.models.policy import PolicySource

HERE = Path(__file__).parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRL_USAGE_STATS_DISABLED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
TIMES = ("step_s", "rollout_s", "update_s")

Block = Mapping[str, Any]


def run_side(script: str, python: str, folder: Path, policy: Path, arguments: Any, *, seed: int) -> Block:
    """One side in a process of its own; its last line is its result."""
    command = [python, str(HERE / script), "--policy", str(policy), "--folder", str(folder), "--seed", str(seed)]
    for name in ("steps", "prompts", "group_size", "max_tokens", "learning_rate", "threads", "reward_where"):
        value = getattr(arguments, name)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr[-4000:]}")
    block: Block = json.loads(done.stdout.splitlines()[-1])
    return block


def run_blocks(arguments: Any) -> dict[str, list[Block]]:
    """Results by side, one a seed."""
    sides = {"rhymerl": ("echo_rhymerl.py", sys.executable)}
    if arguments.trl_python is not None:
        sides["trl"] = ("echo_peer.py", arguments.trl_python)
    blocks: dict[str, list[Block]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.seeds):
            seed = arguments.seed + number
            policy = Path(folder, f"policy-{seed}")
            PolicySource(init=echo_task.MODEL, characters=echo_task.CHARACTERS, seed=seed).load().save(policy)
            for side in list(sides)[:: -1 if number % 2 else 1]:
                script, python = sides[side]
                logs = Path(folder, f"{side}-{seed}")
                block = run_side(script, python, logs, policy, arguments, seed=seed)
                blocks[side].append(block)
                print(side, record.cell(summary([block], arguments)), file=sys.stderr, flush=True)
    return blocks


def medians(block: Block, arguments: Any) -> dict[str, float]:
    """Return the medians of one block: median seconds after the warm-up."""
    times = {name: block[name][arguments.warm_up :] for name in TIMES}
    other = [step - rollout - update for step, rollout, update in zip(*times.values(), strict=True)]
    return {name: statistics.median(values) for name, values in {**times, "other_s": other}.items()}


def summary(blocks: Sequence[Block], arguments: Any) -> dict[str, Any]:
    """One side's row of the table."""
    found = [medians(block, arguments) for block in blocks]
    times = {name: record.spread(each[name] for each in found) for name in found[0]}
    return {
        **times,
        "reward_first5": record.spread(statistics.mean(block["reward"][:5]) for block in blocks),
        "reward_last5": record.spread(statistics.mean(block["reward"][-5:]) for block in blocks),
        "reward_mean": record.spread(statistics.mean(block["reward"]) for block in blocks),
        "tokens_per_answer": record.spread(statistics.mean(block["length"]) for block in blocks),
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--reward-where", choices=["pool", "main"], default="pool")
    arguments = parser.parse_args(words)
    if arguments.warm_up >= arguments.steps:
        parser.error(f"--warm-up {arguments.warm_up}: expected less than --steps {arguments.steps}")
    start = record.environment()
    blocks = run_blocks(arguments)
    ours, theirs = blocks["rhymerl"], blocks.get("trl")
    pairs = [(medians(a, arguments), medians(b, arguments)) for a, b in zip(ours, theirs or [], strict=False)]
    return record.finish(
        "trl_echo",
        __doc__,
        arguments,
        rows=[{"side": side, **summary(found, arguments)} for side, found in blocks.items()],
        start=start,
        speedup=record.spread(b["step_s"] / a["step_s"] for a, b in pairs) if pairs else None,
        versions={side: found[0]["versions"] for side, found in blocks.items()},
    )


if __name__ == "__main__":
    main()
