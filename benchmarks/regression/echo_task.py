"""The echo task: nothing here needs more than the standard library, so other environments can load it, too.

A prompt is one letter three times and a colon; the reward is the share of the answer that is this letter. A random
model earns about one over the vocabulary.
"""

from __future__ import annotations

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
