"""The time of a model's forward pass by its tokens, replayed from a CUDA graph: no engine's pass is shorter.

The tokens are one sequence without keys from before, and all of them get logits, as in a pass that decodes or verifies.
The weights are random, in bfloat16. `launched_ms` is the same pass without a graph, as the host launches it.
`emulated_from.py` makes a file for an `EmulatedBackend` of these rows.

    python -m benchmarks.gpu.passes --sizes 0.5B 7B
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks import record
from benchmarks.gpu.bare import policy_of
from benchmarks.gpu.device_time import device, milliseconds

TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024)


def measure(arguments: Any, size: str, tokens: int) -> dict[str, Any]:
    model = policy_of(size, arguments.dtype, arguments.seed).model
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=model.device)
    times = partial(milliseconds, repeats=arguments.repeats, calls=arguments.calls)
    with torch.inference_mode():
        launched = partial(forward, model, ids)
        plain = times(launched)
        replayed = times(captured(launched)) if device() == "cuda" else plain
    return {
        "pass_ms": record.spread(replayed),
        "launched_ms": record.spread(plain),
        "kv_bytes_per_token": kv_bytes_per_token(model),
    }


def forward(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits with SDPA's causal mask: transformers would inspect a mask's values and wait for the device."""
    logits: torch.Tensor = model(input_ids=ids, attention_mask={"full_attention": None}, use_cache=False).logits
    return logits


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of it; it has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Return the bytes of the keys and values of a token in all layers."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * width * model.dtype.itemsize)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=7, dtype=str, sizes=["0.5B", "7B"], counts=list(TOKENS), calls=5)
    arguments = record.begin(parser, words)
    cases = record.cases(size=arguments.sizes, tokens=arguments.counts)
    return record.finish("gpu_passes", __doc__, arguments, rows=record.rows_of(cases, partial(measure, arguments)))


if __name__ == "__main__":
    main()
