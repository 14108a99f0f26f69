"""SGLang's n-gram worker with a rhymerl drafter in the place of its corpus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.speculative import ngram_worker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from rhymerl.backends.sglang.plugin.arrays import TreeArrays
from rhymerl.backends.sglang.plugin.drafting import EngineDrafting, not_yet_known
from rhymerl.backends.sglang.plugin.masks import full_mask
from rhymerl.backends.sglang.plugin.names import ALGORITHM
from rhymerl.backends.sglang.plugin.settings import EngineSettings

_MAKES_MASKS = getattr(ngram_worker, "USE_FULL_MASK", False) and hasattr(ngram_worker, "_is_cpu")


@contextmanager
def _bare_trees() -> Iterator[None]:
    """Context in which SGLang leaves the trees' own masks as they are; elsewhere nobody would complete them."""
    if not _MAKES_MASKS:
        yield
        return
    ngram_worker.USE_FULL_MASK = False
    try:
        yield
    finally:
        ngram_worker.USE_FULL_MASK = True


class _NoCorpus:
    """Stands in for SGLang's n-gram corpus, whose constructor would compile C++; nothing is ever looked up in it."""

    def __init__(self, **settings: object) -> None:
        pass

    def erase_match_state(self, requests: object) -> None:
        """Nothing is kept of requests here."""

    def reset(self) -> None:
        """Do nothing: there is nothing to forget."""


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

    def _prepare_for_speculative_decoding(self, batch: Any) -> None:
        """SGLang's own, but for the mask of attention on a GPU: it makes that request by request, of some thousand small kernels."""
        has_trees = batch.forward_mode.is_decode()
        with _bare_trees():
            super()._prepare_for_speculative_decoding(batch)
        if has_trees and _MAKES_MASKS and not ngram_worker._is_cpu:
            trees, num_tokens = batch.spec_info.custom_mask, int(batch.seq_lens_cpu.sum())
            batch.spec_info.custom_mask = full_mask(trees, batch.seq_lens, self.draft_token_num, num_tokens=num_tokens)

    def _prepare_draft_tokens(self, batch: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
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
        """Return rank 0's trees."""
        group = get_tp_group()
        if group.world_size == 1:
            assert trees is not None
            return trees
        flat = np.zeros((num_requests, 2 * self.draft_token_num), np.int64) if trees is None else trees.flat()
        shared = torch.from_numpy(flat)
        torch.distributed.broadcast(shared, src=group.ranks[0], group=group.cpu_group)
        return TreeArrays.unflat(shared.numpy())

    def _update_ngram_corpus(self, batch: Any) -> None:
        """The verify pass is launched, and a GPU is busy with it; on a CPU it is over, and nothing is gained by waiting for it."""
        if self._drafting is not None and self.device != "cpu":
            self._drafting.catch_up()


class HistoryAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """Speculation by our worker, which the rest of SGLang takes for n-gram speculation, whatever it asks."""

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


def install() -> None:
    """Register the algorithm; once a process."""
    SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=HistoryAlgorithm)(
        lambda server_args: HistoryWorker
    )
