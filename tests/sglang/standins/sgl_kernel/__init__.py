"""Test-only stand-in: torch versions of the kernels that SGLang imports from `sgl_kernel` on a CPU.

The CPU build of that package is on no registry. Slow and plain on purpose; nothing outside the tests may use it.
`mutable` arguments are written in place, as the kernels do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from sgl_kernel import speculative as speculative


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow each tree from node 0 to the child that holds the target's token, until no child does.

    `candidates`, the links and `target_predict` are [bs, n]; mutable are `predicts` [bs * n] (the target's token behind
    every accepted node), `accept_index` [bs, depth] (flat indices of the accepted nodes, node 0 among them; the rest
    stays as it was) and `accept_token_num` [bs] (accepted nodes without node 0).
    """
    for row in range(len(candidates)):
        index, tokens, targets, children, siblings = (
            each[row].tolist()
            for each in (retrive_index, candidates, target_predict, retrive_next_token, retrive_next_sibling)
        )
        path = [0]
        while len(path) < accept_index.shape[1]:
            node = children[path[-1]]
            while node != -1 and tokens[node] != targets[path[-1]]:
                node = siblings[node]
            if node == -1:
                break
            path.append(node)
        accept_index[row, : len(path)] = torch.tensor([index[node] for node in path], dtype=accept_index.dtype)
        accept_token_num[row] = len(path) - 1
        for node in path:
            predicts[index[node]] = targets[node]


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Gather the KV slots [start, end) of every request, in order, into `out_cache_loc` (mutable)."""
    filled = 0
    for request, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        out_cache_loc[filled : filled + end - start] = req_to_token[request, start:end]
        filled += end - start


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Scatter `out_cache_loc` into the positions [start, end) of every request's row of `req_to_token` (mutable)."""
    taken = 0
    for request, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[request, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Write the KV slots of the accepted nodes, -1 left out, to the front of `accept_out_cache_loc` (mutable)."""
    index = accept_index.flatten()
    slots = out_cache_loc[index[index != -1].long()]
    accept_out_cache_loc[: len(slots)] = slots


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy the slots `src_loc` onto `tgt_loc` in every buffer, all reads before the first write.

    `data_ptrs` holds the buffers' addresses, `strides` the bytes of one slot in each.
    """
    if not len(src_loc):
        return
    num_slots = int(torch.maximum(src_loc.max(), tgt_loc.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (num_slots * stride)).from_address(address)
        slots = torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, stride)
        slots[tgt_loc.long()] = slots[src_loc.long()]


def _imported_only(name: str) -> Callable[..., NoReturn]:
    """A name that SGLang imports together with the others, and that no test may reach."""

    def kernel(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"the test stand-in of sgl_kernel has no {name}")

    return kernel


assign_draft_cache_locs_contiguous_cpu = _imported_only("assign_draft_cache_locs_contiguous_cpu")
build_tree_kernel_efficient_cpu = _imported_only("build_tree_kernel_efficient_cpu")
fill_bonus_tokens_cpu = _imported_only("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _imported_only("rotate_input_ids_cpu")
