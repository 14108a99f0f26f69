"""SGLang's n-gram worker with a rhymerl drafter in the place of its corpus, and our draw in the place of its verification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.speculative import eagle_utils, ngram_worker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from rhymerl.backends.sglang import keyed
from rhymerl.backends.sglang.arrays import TreeArrays
from rhymerl.backends.sglang.drafting import EngineDrafting, not_yet_known
from rhymerl.backends.sglang.sampler import warn_once
from rhymerl.backends.sglang.settings import EngineSettings

if TYPE_CHECKING:
    from torch import Tensor

NAME = "RHYMERL"


class _NoCorpus:
    """Stands in for SGLang's n-gram corpus, whose constructor would compile C++; nothing is ever looked up in it."""

    def __init__(self, **settings: object) -> None:
        pass

    def erase_match_state(self, requests: object) -> None:
        """Nothing is kept of requests here."""

    def reset(self) -> None:
        """Nothing to forget."""


class HistoryWorker(ngram_worker.NGRAMWorker):  # type: ignore[misc]
    """Rank 0 drafts and sends its trees to the other tensor-parallel ranks: an index that is swapped by a thread would differ."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._drafting: EngineDrafting | None = None
        corpus, ngram_worker.NgramCorpus = ngram_worker.NgramCorpus, _NoCorpus
        try:
            super().__init__(*args, **kwargs)
        finally:
            ngram_worker.NgramCorpus = corpus
        if get_tp_group().rank_in_group == 0:
            vocabulary = int(self.model_runner.model_config.vocab_size)
            self._drafting = EngineSettings.of_this_process().drafting(self.draft_token_num, vocabulary)

    def clear_cache_pool(self) -> None:
        """History is no cache: it outlives new weights."""
        self._prev_decode_rids: set[str] = set()
        if self._drafting is not None:
            self._drafting.flush()

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        """There are no weights besides the target's, which are updated by others; 0.5.17 asks all the same."""
        return True, "the drafter has no weights"

    def _prepare_draft_tokens(self, batch: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Token ids [R * n] and masks [R * n * n] of the batch's trees."""
        ahead = not_yet_known(
            batch.reqs,
            batch.seq_lens_cpu.tolist(),
            lambda: batch.spec_info.accept_tokens.view(len(batch.reqs), -1).cpu().tolist(),
        )
        trees = self._drafting.propose(batch.reqs, ahead) if self._drafting is not None else None
        trees = self._shared(trees, len(batch.reqs))
        return trees.token_ids.reshape(-1), trees.mask().reshape(-1)

    def _shared(self, trees: TreeArrays | None, num_requests: int) -> TreeArrays:
        """Rank 0's trees."""
        group = get_tp_group()
        if group.world_size == 1:
            assert trees is not None
            return trees
        flat = np.zeros((num_requests, 2 * self.draft_token_num), np.int64) if trees is None else trees.flat()
        shared = torch.from_numpy(flat)
        torch.distributed.broadcast(shared, src=group.ranks[0], group=group.cpu_group)
        return TreeArrays.unflat(shared.numpy())

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Nothing: the drafter reads the requests' own tokens at the next pass."""


class HistoryAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """To the rest of SGLang it is n-gram speculation, whatever it is asked."""

    def create_worker(self, server_args: Any) -> type:
        """The worker's class."""
        return HistoryWorker


def _like_ngram(name: str) -> Any:
    def ask(self: HistoryAlgorithm, *args: Any, **kwargs: Any) -> Any:
        return getattr(SpeculativeAlgorithm.NGRAM, name)(*args, **kwargs)

    return ask


for _name, _value in vars(SpeculativeAlgorithm).items():
    if callable(_value) and not _name.startswith("_") and _name not in ("create_worker", "from_string", "register"):
        setattr(HistoryAlgorithm, _name, _like_ngram(_name))


def keyed_verify(original: Any) -> Any:
    """Sample first, then follow the tree: each node's own draw decides, and no draft can bias it."""

    def verify(
        verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if batch.forward_mode.is_idle() or grammar_mask is not None or not keyed.is_plain(batch.sampling_info):
            if not batch.forward_mode.is_idle():
                warn_once()
            with keyed.without_seeds(batch):
                return original(verify_input, batch, logits_output, grammar_mask, *args, **kwargs)
        n, num_requests = verify_input.draft_token_num, len(batch.seq_lens)
        logits = logits_output.next_token_logits
        drawn = keyed.draw(logits, batch.sampling_info, verify_input.positions, each=n)
        return _follow(verify_input, drawn.view(num_requests, n))

    return verify


def _follow(verify_input: Any, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SGLang's greedy walk, with the draws [R, n] as what the target predicts: tokens, accepted lengths (with the bonus), indices."""
    num_requests, n = drawn.shape
    like = torch.empty(0, dtype=torch.int32, device=drawn.device)
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
        target_predict=drawn,
        topk=verify_input.tree_topk,
    )
    group = get_tp_group()
    if group.world_size > 1:  # sums over a vocabulary need not be the same on two devices
        for each in (predict, lengths, index):
            group.broadcast(each, src=0)
    return predict, lengths + 1, index


def install() -> None:
    """Register the algorithm and its verification; once a process."""
    ngram_worker.eagle_sample = keyed_verify(ngram_worker.eagle_sample)
    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=HistoryAlgorithm)(
        lambda server_args: HistoryWorker
    )
