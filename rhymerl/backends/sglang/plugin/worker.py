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

from rhymerl.backends.sglang.plugin.arrays import TreeArrays, full_mask
from rhymerl.backends.sglang.plugin.drafting import EngineDrafting, not_yet_known
from rhymerl.backends.sglang.plugin.names import ALGORITHM, WIDEST
from rhymerl.backends.sglang.plugin.pass_sizes import PassSizes
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
        """Do nothing: no state of requests is kept here."""

    def reset(self) -> None:
        """Do nothing: there is nothing to forget."""


class HistoryWorker(ngram_worker.NGRAMWorker):  # type: ignore[misc]
    """Rank 0 drafts and sends its trees to the other tensor-parallel ranks.

    Ranks that draft on their own would differ: a thread swaps indices, and clocks differ.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._drafting: EngineDrafting | None = None
        self._trees: TreeArrays | None = None  # of the pass that is prepared; None: it has no drafts
        corpus, ngram_worker.NgramCorpus = ngram_worker.NgramCorpus, _NoCorpus
        try:
            super().__init__(*args, **kwargs)
        finally:
            ngram_worker.NgramCorpus = corpus
        settings, self._most = EngineSettings.of_this_process(), int(self.draft_token_num)
        budget = settings.budget_of(self._most)
        self._sizes = PassSizes(self, [1 + width for width in budget.widths])
        if get_tp_group().rank_in_group == 0:
            vocabulary = int(self.model_runner.model_config.vocab_size)
            self._drafting = settings.drafting(budget, vocabulary)
            settings.warm_up(self._most, vocabulary)

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """SGLang's own, and the buffers of smaller passes."""
        super().alloc_memory_pool(*args, **kwargs)
        self._sizes.make_buffers()

    def init_cuda_graphs(self) -> None:
        """SGLang's own, and the attention and graphs of smaller passes."""
        super().init_cuda_graphs()
        self._sizes.make_runners()

    def clear_cache_pool(self) -> None:
        """History is no cache: it outlives new weights."""
        self._prev_decode_rids: set[str] = set()
        if self._drafting is not None:
            self._drafting.flush()

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        """Do nothing: only the target has weights, which others update; 0.5.17 asks all the same."""
        return True, "the drafter has no weights"

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """SGLang's own, in passes of as many tokens a request as the trees have."""
        if not batch.forward_mode.is_decode():
            if self._drafting is not None and not batch.forward_mode.is_idle():
                self._drafting.note_other_pass()
            return super().forward_batch_generation(batch, *args, **kwargs)
        self._trees = self._draft(batch)
        with self._sizes.sized(1 if self._trees is None else self._trees.n):
            result = super().forward_batch_generation(batch, *args, **kwargs)
        relayed = result.next_draft_input  # its tokens have the widest pass's columns
        relayed.draft_token_num = relayed.num_tokens_per_req = relayed.num_tokens_for_logprob_per_req = self._most
        return result

    def _draft(self, batch: Any) -> TreeArrays | None:
        """Return the trees of the batch, the same on all ranks; None where there are no drafts."""
        trees = None
        if self._drafting is not None:
            requests, lengths = batch.reqs, batch.seq_lens_cpu.tolist()

            def sampled() -> list[list[int]]:
                tokens: list[list[int]] = batch.spec_info.accept_tokens.view(len(requests), -1).cpu().tolist()
                return tokens

            trees = self._drafting.propose(requests, lambda: not_yet_known(requests, lengths, sampled))
        group = get_tp_group()
        if group.world_size == 1:
            return trees
        message = torch.from_numpy(TreeArrays.message(trees, len(batch.reqs), self._most))
        torch.distributed.broadcast(message, src=group.ranks[0], group=group.cpu_group)
        return TreeArrays.from_message(message.numpy(), len(batch.reqs))

    def _prepare_for_speculative_decoding(self, batch: Any) -> None:
        """Prepare a pass as SGLang does, but for the attention mask on a GPU.

        SGLang makes the mask request by request, with some thousand small kernels. Without drafts the last tokens need
        not have come to the host.
        """
        if not batch.forward_mode.is_decode():
            super()._prepare_for_speculative_decoding(batch)
            return
        roots = last_tokens(batch.spec_info) if self._trees is None else None
        with _bare_trees():
            super()._prepare_for_speculative_decoding(batch)
        if roots is not None:
            batch.input_ids.copy_(roots)
        if _MAKES_MASKS and not ngram_worker._is_cpu:
            trees, num_tokens = batch.spec_info.custom_mask, int(batch.seq_lens_cpu.sum())
            batch.spec_info.custom_mask = full_mask(trees, batch.seq_lens, self.draft_token_num, num_tokens=num_tokens)
        setattr(batch.spec_info, WIDEST, self._most)

    def _prepare_draft_tokens(self, batch: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return token ids [R * n] and masks [R * n * n] of the trees; without drafts the caller adds the tokens."""
        if self._trees is None:
            return np.zeros(len(batch.reqs), np.int64), np.ones(len(batch.reqs), np.bool_)
        return self._trees.token_ids.reshape(-1), self._trees.mask().reshape(-1)

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Catch up while a GPU is busy with the launched verify pass; on a CPU it is over, so nothing is gained."""
        if self._drafting is not None and self.device != "cpu":
            self._drafting.catch_up()


def last_tokens(relayed: Any) -> torch.Tensor:
    """Return the last token that each request has sampled, [R], from what a pass hands to the next one."""
    tokens, last = relayed.accept_tokens.view(len(relayed.accept_lens), -1), relayed.accept_lens.long() - 1
    found: torch.Tensor = tokens.gather(1, last[:, None])[:, 0]
    return found


class HistoryAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """Speculation by our worker, which the rest of SGLang takes for n-gram speculation, whatever it asks."""

    def create_worker(self, server_args: Any) -> type:
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
