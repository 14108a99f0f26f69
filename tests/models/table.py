"""The table of model families in docs/models.md, by the proofs that every run begins with, on small random models.

python -m tests.models.table
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from rhymerl.engine import support
from rhymerl.errors import ConfigError
from rhymerl.models.decoder import decoder_of
from rhymerl.models.proof import prove_sharing, prove_update
from tests.models.hybrid import HYBRIDS, hybrid_model
from tests.models.small import LATENT, small_model
from tests.models.windowed import FAMILIES, windowed_model
from tests.models.wrapped import WRAPPED, wrapped_model

EXACT, SINGLE = "within 1e-12", "within 1e-4 (parts in float32)"
_WINDOW = {"sliding_window": 4}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
_SMALL_EXPERTS = {
    **_EXPERTS,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
_PLAIN = (
    "llama qwen2 qwen3 smollm3 olmo2 glm4 granite phi3 ernie4_5 hunyuan_v1_dense apertus nanochat seed_oss gemma cohere"
)
OTHERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN.split()},
    **dict.fromkeys(("starcoder2", "ministral3", "vaultgemma", "cwm"), _WINDOW),
    "gemma4_text": {
        **_WINDOW,
        "vocab_size_per_layer_input": 19,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 8,
    },
    "qwen3_moe": _SMALL_EXPERTS,
    "mixtral": _EXPERTS,
    "minimax_m2": _EXPERTS,
    "glm4_moe": _SMALL_EXPERTS,
    "exaone_moe": _SMALL_EXPERTS,
    "afmoe": _SMALL_EXPERTS,
    "deepseek_v32": LATENT,
    "jamba": _EXPERTS,
    "minimax": _EXPERTS,
    "kimi_linear": _SMALL_EXPERTS,
}


def _other(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    settings = {"initializer_range": 0.3, "max_position_embeddings": 256, **OTHERS[name]}
    return small_model(name, dtype=torch.float64, **settings).eval()


_SETS: list[tuple[str, Mapping[str, Any], Callable[[str], PreTrainedModel]]] = [
    ("attention, experts", OTHERS, _other),
    ("windows, latents", FAMILIES, windowed_model),
    ("hybrid", HYBRIDS, hybrid_model),
    ("beside a tower", WRAPPED, wrapped_model),
]


def table() -> list[str]:
    """The lines of the table, a family each; differences of log-probs are told by their order alone."""
    lines = [
        "| `model_type` | kind | embedded engine: log-probs, against transformers | shared prompts in the update |",
        "|---|---|---|---|",
    ]
    for kind, families, build in _SETS:
        for name in sorted(families):
            model = build(name)
            lines.append(f"| {name} | {kind} | {_engine(model)} | {_sharing(model)} |")
    return lines


def _engine(model: PreTrainedModel) -> str:
    try:
        support.refuse_unsupported(model)
        support.prove_engine(model)
    except ConfigError:
        return "refused"
    difference, _ = support._difference(model, torch.float64)
    return EXACT if difference < 1e-12 else SINGLE


def _sharing(model: PreTrainedModel) -> str:
    try:
        prove_update(model)
        reason = prove_sharing(decoder_of(model), 256, model=model)
    except ConfigError:
        return "refused"
    return "yes" if reason is None else f"no: {reason}"


if __name__ == "__main__":
    print("\n".join(table()))
