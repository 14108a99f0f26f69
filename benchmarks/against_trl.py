"""What the comparisons with TRL's GRPOTrainer have in common: each seed is a block of two processes, one a side, in turn."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import record

HERE = Path(__file__).parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRL_USAGE_STATS_DISABLED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
TIMES = ("step_s", "rollout_s", "update_s")
PASSED_ON = (
    "steps",
    "prompts",
    "group_size",
    "max_tokens",
    "learning_rate",
    "threads",
    "reward_where",
    "rows_per_backward",
    "micro_batch_tokens",
)

Block = Mapping[str, Any]
Save = Callable[[Path, int], None]  # writes the policy that a seed begins with


def options(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return the options of a comparison."""
    parser = record.options(description)
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warm-up", type=int)
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--reward-where", choices=["pool", "main"], default="pool")
    parser.add_argument("--rows-per-backward", type=int, help="answers in each of TRL's backwards (default: all)")
    parser.add_argument(
        "--micro-batch-tokens", type=int, help="tokens in each of our backwards (default: that of rhymerl)"
    )
    parser.set_defaults(**defaults)
    return parser


def compare(
    name: str,
    description: str | None,
    parser: argparse.ArgumentParser,
    words: Sequence[str] | None,
    *,
    save: Callable[[Any], Save],
    rows: Callable[[Any], Sequence[Mapping[str, Any]]],
    reward: Callable[[Any], str],
) -> dict[str, Any]:
    """Measure both sides on these rows and this reward (MODULE.FUNCTION); return and write the result.

    `save`, `rows` and `reward` are asked with the options.
    """
    arguments = parser.parse_args(words)
    if arguments.warm_up >= arguments.steps:
        parser.error(f"--warm-up {arguments.warm_up}: expected less than --steps {arguments.steps}")
    start = record.environment()
    blocks = run_blocks(arguments, save(arguments), rows(arguments), reward(arguments))
    ours, theirs = blocks["rhymerl"], blocks.get("trl")
    pairs = [(medians(a, arguments), medians(b, arguments)) for a, b in zip(ours, theirs or [], strict=False)]
    return record.finish(
        name,
        description,
        arguments,
        rows=[{"side": side, **summary(found, arguments)} for side, found in blocks.items()],
        start=start,
        speedup=record.spread(b["step_s"] / a["step_s"] for a, b in pairs) if pairs else None,
        versions={side: found[0]["versions"] for side, found in blocks.items()},
    )


def run_blocks(arguments: Any, save: Save, rows: Sequence[Mapping[str, Any]], reward: str) -> dict[str, list[Block]]:
    """Results by side, one a seed."""
    sides = {"rhymerl": ("rhymerl_side.py", sys.executable)}
    if arguments.trl_python is not None:
        sides["trl"] = ("trl_side.py", arguments.trl_python)
    blocks: dict[str, list[Block]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "rows.jsonl")
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for number in range(arguments.seeds):
            seed = arguments.seed + number
            policy = Path(folder, f"policy-{seed}")
            save(policy, seed)
            for side in list(sides)[:: -1 if number % 2 else 1]:
                script, python = sides[side]
                files = {"policy": policy, "rows": data, "folder": Path(folder, f"{side}-{seed}")}
                block = run_side([python, str(HERE / script)], {**files, "reward": reward, "seed": seed}, arguments)
                blocks[side].append(block)
                print(side, record.cell(summary([block], arguments)), file=sys.stderr, flush=True)
    return blocks


def run_side(command: Sequence[str], settings: Mapping[str, Any], arguments: Any) -> Block:
    """One side in a process of its own; its last line is its result."""
    settings = {**settings, **{name: getattr(arguments, name) for name in PASSED_ON}}
    words = [
        word
        for name, value in settings.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[-1]} failed:\n{done.stderr[-4000:]}")
    block: Block = json.loads(done.stdout.splitlines()[-1])
    return block


def medians(block: Block, arguments: Any) -> dict[str, float]:
    """Return the medians of one block: median seconds after the warm-up."""
    times = {name: block[name][arguments.warm_up :] for name in TIMES}
    other = [step - rollout - update for step, rollout, update in zip(*times.values(), strict=True)]
    return {name: statistics.median(values) for name, values in {**times, "other_s": other}.items()}


def summary(blocks: Sequence[Block], arguments: Any) -> dict[str, Any]:
    """One side's row of the table."""
    found = [medians(block, arguments) for block in blocks]
    times = {name: record.spread(each[name] for each in found) for name in found[0]}
    tokens = [arguments.prompts * arguments.group_size * statistics.mean(block["length"]) for block in blocks]
    per_token = [1e3 * each["step_s"] / number for each, number in zip(found, tokens, strict=True)]
    return {
        **times,
        "ms_per_token": record.spread(per_token),
        "reward_first5": record.spread(statistics.mean(block["reward"][:5]) for block in blocks),
        "reward_last5": record.spread(statistics.mean(block["reward"][-5:]) for block in blocks),
        "reward_mean": record.spread(statistics.mean(block["reward"]) for block in blocks),
        "tokens_per_answer": record.spread(statistics.mean(block["length"]) for block in blocks),
    }
