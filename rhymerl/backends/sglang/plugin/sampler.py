"""SGLang's ordinary sampler with our draw: for first tokens of answers, and for all tokens without a drafter."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any, cast

import torch
import torch.distributed as dist
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from rhymerl.backends.sglang.plugin import keyed

log = logging.getLogger(__name__)
_NAMES = ("pytorch", "flashinfer")  # SGLang settles on one of these by itself


class KeyedSampler(Sampler):  # type: ignore[misc]
    """Draws with noise keyed by request and position; grammars, penalties and the like go to SGLang's sampler."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: torch.Tensor,
        **more: Any,
    ) -> torch.Tensor:
        """Token ids [requests]; log-probs go into `logits_output`."""
        others = return_logprob and (
            any(top_logprobs_nums or ()) or any(each is not None for each in token_ids_logprobs or ())
        )
        if others or more or not keyed.is_plain(sampling_info):
            warn_once()
            theirs = dataclasses.replace(sampling_info, sampling_seed=None)  # some of its ways refuse seeds
            given = (logits_output, theirs, return_logprob, top_logprobs_nums, token_ids_logprobs, positions)
            return cast(torch.Tensor, super().forward(*given, **more))
        tokens, logprobs = keyed.draw(logits_output.next_token_logits, sampling_info, positions, each=1)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        if return_logprob:
            self._sync_token_ids_across_tp(logprobs, sampling_info)  # those of the first rank's tokens
            logits_output.next_token_logprobs = logprobs
        return tokens

    def _sync_token_ids_across_tp(self, batch_next_token_ids: torch.Tensor, sampling_info: Any) -> None:
        """Give all ranks the tokens of the first: sums over a vocabulary need not be the same on two devices."""
        if dist.get_world_size(self.tp_sync_group) > 1:
            dist.broadcast(batch_next_token_ids, group=self.tp_sync_group, group_src=0)


@functools.cache
def warn_once() -> None:
    """Say which requests are sampled by SGLang's own rule."""
    log.warning(
        "rhymerl: requests with penalties, a logit bias, a grammar, a logit processor or top log-probs are sampled by SGLang's own "
        "sampler; their tokens may change with the drafter"
    )


def install() -> None:
    """Make it the engine's sampler, and give every batch its counters; once a process."""
    for name in _NAMES:
        register_sampler_backend(name, KeyedSampler)
    original = SamplingBatchInfo.from_schedule_batch.__func__

    @functools.wraps(original)
    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = original(cls, batch, vocab_size)
        keyed.VOCABULARY.follow(batch.reqs)
        counters = [keyed.first_counter(request) for request in batch.reqs]
        info.sampling_seed = torch.tensor(counters, dtype=torch.int64).to(info.device, non_blocking=True)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)
