"""A probe for what rhymerl's plugin needs of SGLang, by name, because versions move and rename things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name

from rhymerl.errors import BackendError

_SPECULATIVE = "sglang.srt.speculative"
_DRAFTING = {
    f"{_SPECULATIVE}.ngram_worker": (
        "NgramCorpus",
        "NGRAMWorker._init_preallocated_tensors",
        "NGRAMWorker._prepare_draft_tokens",
        "NGRAMWorker._prepare_for_speculative_decoding",
        "NGRAMWorker._update_ngram_corpus",
        "NGRAMWorker.alloc_memory_pool",
        "NGRAMWorker.clear_cache_pool",
        "NGRAMWorker.init_cuda_graphs",
    ),
    f"{_SPECULATIVE}.spec_info": ("SpeculativeAlgorithm.NGRAM", "SpeculativeAlgorithm.register"),
    f"{_SPECULATIVE}.spec_registry": ("CustomSpecAlgo.create_worker",),
    "sglang.srt.distributed.parallel_state": ("get_tp_group",),
    "sglang.srt.model_executor.model_runner": ("ModelRunner._get_attention_backend",),
    "sglang.srt.model_executor.runner": ("DecodeCudaGraphRunner",),
    "sglang.srt.runtime_context": ("get_context",),
}
_DRAWING = {
    "sglang.srt.layers.sampler": (
        "register_sampler_backend",
        "Sampler.forward",
        "Sampler._sync_token_ids_across_tp",
    ),
    "sglang.srt.sampling.sampling_batch_info": (
        "SamplingBatchInfo.from_schedule_batch",
        "SamplingBatchInfo.sampling_seed",
    ),
    f"{_SPECULATIVE}.ngram_worker": ("eagle_sample",),
    f"{_SPECULATIVE}.eagle_utils": ("verify_tree_greedy_func",),
    "sglang.srt.distributed.parallel_state": ("get_tp_group",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Names that are not there: for our drafters, and for our way of sampling tokens."""

    drafting: Sequence[str] = ()
    drawing: Sequence[str] = ()

    @classmethod
    def of_this_version(cls) -> Findings:
        """Imports SGLang's modules."""
        return cls(drafting=_missing(_DRAFTING), drawing=_missing(_DRAWING))

    def check(self, *, drafts: bool, on_cpu: bool) -> None:
        """Raise BackendError where drafts are wanted and cannot be had, or would change what is sampled."""
        missing = [*self.drafting, *(self.drawing if on_cpu else ())]  # SGLang's own verification is greedy on a CPU
        if drafts and missing:
            raise BackendError(
                f"this version of SGLang lacks what rhymerl's drafters need ({', '.join(missing)}): take drafter=none, or another version"
            )


def _missing(wanted: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{module}.{name}" for module, names in wanted.items() for name in names if not _has(module, name)]


def _has(module: str, name: str) -> bool:
    try:
        resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError):
        return False
    return True
