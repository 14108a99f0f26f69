"""The echo task, as both sides of `trl_echo.py` see it: nothing here needs more than the standard library.

A prompt is one letter three times and a colon; the reward is the share of the answer that is this letter. A random
model earns about one over the vocabulary.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnop"
CHARACTERS = f"?{LETTERS}:"  # with padding and end of answer a vocabulary of 20
MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def rows() -> list[dict[str, str]]:
    return [{"prompt": f"{letter * 3}:", "target": letter} for letter in LETTERS]


def echo(completion: str, *, target: str) -> float:
    """The reward, as a rhymerl reward function."""
    return completion.count(target) / len(completion) if completion else 0.0


def side_options(description: str | None) -> argparse.ArgumentParser:
    """Return the options of either side."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--policy", type=Path, required=True, help="Hugging Face directory to start from")
    parser.add_argument("--folder", type=Path, required=True, help="for logs")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True, help="a step")
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--reward-where", choices=["pool", "main"], default="pool", help="rhymerl only")
    return parser
