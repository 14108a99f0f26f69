"""Test-only attention for the CPU engine: SGLang's `torch_native`, which ignores tree masks, with tree masks.

SGLang loads `register` in each of its processes as a plugin (the dist-info folder beside this file names it). The
backend keeps the name `torch_native`: SGLang runs its Triton kernels, which a CPU has not, for names it does not know.
"""

from __future__ import annotations

import functools
import importlib
import os
import pydoc
from typing import Any

import torch


def register() -> None:
    """Put tree attention in the place of `torch_native`, and make of SGLang the version that a test asks for."""
    _disguise()
    if os.environ.get("RHYMERL_TEST_WIDTHS"):
        importlib.import_module("scheduled_widths").install()
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("torch_native")(lambda runner: _tree_attention()(runner))


@functools.cache
def _tree_attention() -> Any:
    """Return the class, which can only be made once SGLang's registry is there."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class TreeAttention(TorchNativeAttnBackend):
        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
        ) -> Any:
            if forward_batch.forward_mode.is_target_verify():
                return verify(self, q, k, v, layer, forward_batch)
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

    return TreeAttention


def _disguise() -> None:
    """Hide the names in RHYMERL_TEST_LACKS; make masks as on a GPU where RHYMERL_TEST_MASKS is set."""
    for name in filter(None, os.environ.get("RHYMERL_TEST_LACKS", "").split(",")):
        owner, _, attribute = name.rpartition(".")
        delattr(pydoc.locate(owner), attribute)
    if os.environ.get("RHYMERL_TEST_MASKS"):
        importlib.import_module("sglang.srt.speculative.ngram_worker")._is_cpu = False


def verify(backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any) -> Any:
    """Attend from every node to its request's committed tokens and to its own ancestors."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    backend.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    values = backend.token_to_kv_pool.get_value_buffer(layer.layer_id)
    table = backend.req_to_token_pool.req_to_token
    n = batch.spec_info.draft_token_num
    masks = tree_masks(batch.spec_info.custom_mask, batch.seq_lens.tolist(), n)
    queries = q.view(-1, n, layer.tp_q_head_num, layer.qk_head_dim).transpose(1, 2)
    outputs = []
    for query, request, mask in zip(queries, batch.req_pool_indices.tolist(), masks, strict=True):
        slots = table[request, : mask.shape[1]]
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[None],
            keys[slots].to(q.dtype).transpose(0, 1)[None],
            values[slots].to(q.dtype).transpose(0, 1)[None],
            attn_mask=mask,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        outputs.append(attended[0].transpose(0, 1).reshape(n, -1))
    return torch.cat(outputs)


def tree_masks(flat: torch.Tensor, lengths: list[int], n: int) -> list[torch.Tensor]:
    """One [n, length + n] mask a request: from the ancestors alone (as SGLang passes on a CPU), or from full rows."""
    if flat.numel() == len(lengths) * n * n:
        ancestors = flat.view(-1, n, n).bool()
        return [
            torch.cat((ancestors.new_ones(n, length), own), dim=1)
            for length, own in zip(lengths, ancestors, strict=True)
        ]
    sizes = [n * (length + n) for length in lengths]
    return [rows.view(n, -1).bool() for rows in flat[: sum(sizes)].split(sizes)]
