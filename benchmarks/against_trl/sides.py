"""Command-line options and rewards of both sides of a comparison with TRL; standard library only."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def side_options(description: str | None) -> argparse.ArgumentParser:
    """Return the options of either side."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--policy", type=Path, required=True, help="Hugging Face directory to start from")
    parser.add_argument(
        "--rows", type=Path, required=True, help="JSON lines: prompt, and what the reward is given by name"
    )
    parser.add_argument("--reward", required=True, help="MODULE.FUNCTION, for an answer's text")
    parser.add_argument("--folder", type=Path, required=True, help="for logs")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True, help="a step")
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows-per-backward", type=int, help="TRL only; None = all")
    parser.add_argument("--micro-batch-tokens", type=int, help="rhymerl only; None = its default")
    parser.add_argument("--reward-where", choices=["pool", "main"], default="pool", help="rhymerl only")
    return parser


def rows_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The problems."""
    return [json.loads(line) for line in arguments.rows.read_text().splitlines()]


def reward_of(arguments: argparse.Namespace) -> Callable[..., float]:
    """The reward function."""
    module, _, name = arguments.reward.rpartition(".")
    reward: Callable[..., float] = getattr(importlib.import_module(module), name)
    return reward


def last_number(completion: str, *, answer: str) -> float:
    """1 where the last number of the answer is the right one."""
    found = re.findall(r"\d+", completion)
    return float(bool(found) and found[-1] == answer)


def total(completion: str, *, answer: str) -> float:
    """1 where what follows the last # is the right total."""
    _, mark, found = completion.rpartition("#")
    return float(bool(mark) and found.strip() == answer)
