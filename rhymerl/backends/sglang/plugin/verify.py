"""Our draw in the place of SGLang's verification of drafts."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.environ import envs
from sglang.srt.speculative import eagle_utils, ngram_worker
from torch import Tensor
from torch.nn.functional import pad

from rhymerl.backends.sglang.plugin import keyed
from rhymerl.backends.sglang.plugin.names import WIDEST
from rhymerl.backends.sglang.plugin.sampler import warn_once

_LOGPROBS = ("compute_spec_v2_logprobs", "compute_spec_logprobs")  # 0.5.17, 0.5.21


def keyed_verify(original: Any) -> Any:
    """Sample first, then follow the tree: each node's own draw decides, and no draft can bias it."""

    def verify(
        verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if batch.forward_mode.is_idle() or grammar_mask is not None or not keyed.is_plain(batch.sampling_info):
            if not batch.forward_mode.is_idle():
                warn_once()
            logits_output.keyed_logprobs = None
            with keyed.without_seeds(batch):
                found = original(verify_input, batch, logits_output, grammar_mask, *args, **kwargs)
            return _widened(found, verify_input)
        n, num_requests = verify_input.draft_token_num, len(batch.seq_lens)
        logits = logits_output.next_token_logits
        sampled, logprobs = keyed.draw(logits, batch.sampling_info, verify_input.positions, each=n)
        group = get_tp_group()
        if group.world_size > 1:  # as the tokens below
            logprobs = group.broadcast(logprobs, src=0)
        logits_output.keyed_logprobs = logprobs
        return _widened(_accept(verify_input, sampled.view(num_requests, n)), verify_input)

    return verify


def _widened(found: tuple[Tensor, Tensor, Tensor], verify_input: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, lengths and indices, widened to the widest pass's [R, most] columns: SGLang expects them."""
    predict, lengths, index = found
    missing = getattr(verify_input, WIDEST, 0) - index.shape[1]
    return predict, lengths, pad(index, (0, missing), value=-1) if missing > 0 else index


def _accept(verify_input: Any, sampled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, lengths (with bonus) and indices by SGLang's greedy verification against the draws [R, n]."""
    num_requests, n = sampled.shape
    like = torch.empty(0, dtype=torch.int32, device=sampled.device)
    predict, lengths = like.new_zeros(num_requests * n), like.new_empty(num_requests)
    index = like.new_full((num_requests, verify_input.max_tree_depth), -1)
    predict, index, lengths = eagle_utils.verify_tree_greedy_func(
        predicts=predict,
        accept_index=index,
        accept_token_num=lengths,
        candidates=verify_input.draft_token.view(num_requests, n),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=sampled,
        topk=verify_input.tree_topk,
    )
    group = get_tp_group()
    if group.world_size > 1:  # sums over a vocabulary need not be the same on two devices
        for each in (predict, lengths, index):
            group.broadcast(each, src=0)
    return predict, lengths + 1, index


def keyed_logprobs(original: Any) -> Any:
    """Return log-probs of accepted tokens from the draw: an accepted token is always its node's own draw."""

    def logprobs(batch: Any, logits_output: Any, predict: Tensor, *args: Any, **kwargs: Any) -> None:
        logprobs_of_nodes = getattr(logits_output, "keyed_logprobs", None)
        others = any(batch.top_logprobs_nums or ()) or any(each is not None for each in batch.token_ids_logprobs or ())
        if logprobs_of_nodes is None or others or envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get():
            if len(args) > 1:  # 0.5.17: the indices, and their columns but for one
                args = (args[0], args[0].shape[1] - 1, *args[2:])
            original(batch, logits_output, predict, *args, **kwargs)
            return
        index = kwargs["accept_index"] if "accept_index" in kwargs else args[0]
        logits_output.next_token_logprobs = logprobs_of_nodes[index.long()].view(len(batch.seq_lens), -1)

    return logprobs


def install() -> None:
    """Install this verification of n-grams, once a process; versions with log-probs elsewhere keep theirs."""
    ngram_worker.eagle_sample = keyed_verify(ngram_worker.eagle_sample)
    for name in _LOGPROBS:
        if hasattr(ngram_worker, name):
            setattr(ngram_worker, name, keyed_logprobs(getattr(ngram_worker, name)))
