"""A training step of rhymerl and of TRL's GRPOTrainer on the same work, and what each learns from it.

Both sides have the same first weights, prompts and rewards, one optimizer step a rollout, the same learning rate, AdamW
and gradient clipping, float32, TensorBoard every step. Each seed is a block of two processes, one a side, in
alternating order. A step is timed from the end of one to the end of the next, so data, reward and logging are in it;
`other_s` is what is neither generation nor update. The first --warm-up steps are not timed. `ms_per_token` is the step
over all generated tokens. Spreads are over the seeds; `speedup` is TRL's step time over ours, seed by seed. An answer
ends early at its end token only. By --task:

- echo: the echo task (echo_task.py) with a Qwen2 of 64 x 2 layers of random weights, 8 prompts x 8 answers x at most 32
  tokens;
- running_sum: the quickstart's policy, which has imitated sloppy demonstrations, on its problems: a step is a quarter
  of an epoch, of 16 prompts x 8 answers x at most 128 tokens. From the second epoch on our side drafts from the answers
  before;
- sums: the model that `rhymerl warmstart --config warmstart_smollm2_sums` has made adds some 11 numbers step by step.

With --train-size, both sides have so many prompts, and go through them again and again. --model is a GGUF file or a
directory to begin with; --rows-per-backward are the answers in each of TRL's backwards (all, if nothing is said), and
--micro-batch-tokens the tokens in each of ours.

    python -m benchmarks.against_trl.compare --trl-python PYTHON_WITH_TRL [--task echo] [--steps 100] [--seeds 3]
    python -m benchmarks.against_trl.compare --task sums --model out/warmstart_smollm2_sums --max-tokens 256 \\
        --rows-per-backward 6 ...

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.regression import echo_task, guard
from rhymerl.config import compose, instantiate
from rhymerl.models.policy import PolicySource

TIMES = ("step_s", "rollout_s", "update_s")

Block = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained: the policy and the problems of a config, or the echo task, and the options that nobody gives."""

    theme: str
    config: str | None
    reward: str  # MODULE.FUNCTION
    defaults: Mapping[str, Any]

    def source(self, arguments: Any, seed: int) -> PolicySource:
        """Return the policy with which a seed begins."""
        if self.config is None:
            return PolicySource(init=echo_task.MODEL, characters=echo_task.CHARACTERS, seed=seed)
        return PolicySource(arguments.model or compose(self.config).model.path)

    def rows(self, arguments: Any) -> list[dict[str, str]]:
        """Return the problems."""
        if self.config is None:
            return echo_task.rows()[: arguments.train_size]
        settings = [] if self.config != "quickstart" else [f"task.train_size={4 * arguments.prompts}"]
        return list(instantiate(compose(self.config, settings).task).rows("train"))[: arguments.train_size]


TASKS = {
    "echo": Task(
        theme="trl_echo",
        config=None,
        reward="benchmarks.regression.echo_task.echo",
        defaults={"steps": 100, "warm_up": 5, "prompts": 8, "group_size": 8, "max_tokens": 32, "learning_rate": 1e-3},
    ),
    "running_sum": Task(
        theme="trl_running_sum",
        config="quickstart",
        reward="benchmarks.against_trl.sides.total",
        defaults={
            "steps": 32,
            "warm_up": 4,
            "prompts": 16,
            "group_size": 8,
            "max_tokens": 128,
            "learning_rate": 3e-4,
            "rows_per_backward": 64,
        },
    ),
    "sums": Task(
        theme="trl_pretrained",
        config="smollm2_sums",
        reward="benchmarks.against_trl.sides.total",
        defaults={"steps": 20, "warm_up": 2, "prompts": 6, "group_size": 6, "max_tokens": 32, "learning_rate": 3e-5},
    ),
}


def parse(words: Sequence[str] | None) -> Any:
    parser = record.options(
        __doc__,
        trl_python=str,
        model=str,
        train_size=int,
        seeds=3,
        steps=int,
        warm_up=int,
        prompts=int,
        group_size=int,
        max_tokens=int,
        learning_rate=float,
        rows_per_backward=int,
        micro_batch_tokens=int,
    )
    parser.add_argument("--task", choices=list(TASKS), default="echo")
    parser.add_argument("--reward-where", choices=["pool", "main"], default="pool")
    parser.set_defaults(**TASKS[parser.parse_args(words).task].defaults)
    arguments = record.begin(parser, words)
    if arguments.warm_up >= arguments.steps:
        parser.error(f"--warm-up {arguments.warm_up}: expected less than --steps {arguments.steps}")
    return arguments


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = parse(words)
    task = TASKS[arguments.task]
    blocks = run_blocks(task, arguments)
    ours, theirs = blocks["rhymerl"], blocks.get("trl")
    pairs = [(medians(a, arguments), medians(b, arguments)) for a, b in zip(ours, theirs or [], strict=False)]
    return record.finish(
        task.theme,
        __doc__,
        arguments,
        rows=[{"side": side, **summary(found, arguments)} for side, found in blocks.items()],
        speedup=record.spread(b["step_s"] / a["step_s"] for a, b in pairs) if pairs else None,
        versions={side: found[0]["versions"] for side, found in blocks.items()},
    )


def run_blocks(task: Task, arguments: Any) -> dict[str, list[Block]]:
    """Results by side, one a seed."""
    sides = {"rhymerl": sys.executable}
    if arguments.trl_python is not None:
        sides["trl"] = arguments.trl_python
    blocks: dict[str, list[Block]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "rows.jsonl")
        data.write_text("".join(json.dumps(row) + "\n" for row in task.rows(arguments)))
        for number in range(arguments.seeds):
            seed = arguments.seed + number
            policy = Path(folder, f"policy-{seed}")
            task.source(arguments, seed).load().save(policy)
            for side in list(sides)[:: -1 if number % 2 else 1]:
                files = {"policy": str(policy), "rows": str(data), "folder": f"{folder}/{side}-{seed}"}
                block = run_side(sides[side], side, {**files, "reward": task.reward, "seed": seed}, arguments)
                blocks[side].append(block)
                print(side, record.cell(summary([block], arguments)), file=sys.stderr, flush=True)
    return blocks


def run_side(python: str, side: str, settings: Mapping[str, Any], arguments: Any) -> Block:
    """One side in a process of its own; its last line is its result."""
    environment = {**os.environ, **guard.ENVIRONMENT, "TRL_USAGE_STATS_DISABLED": "1"}
    words = json.dumps({**record.settings(arguments), **settings})
    command = [python, "-m", f"benchmarks.against_trl.{side}_side", words]
    done = subprocess.run(command, env=environment, cwd=guard.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-4000:]}")
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


if __name__ == "__main__":
    main()
