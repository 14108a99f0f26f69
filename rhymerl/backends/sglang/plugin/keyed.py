"""The keyed draw inside SGLang: noise by request and position, so that drafts change nothing but the speed.

SGLang keeps one number a request for seeded sampling (`sampling_seed`). Here it is the request's noise counter less the
position of its first token, so that adding a token's position in the sequence gives the counter of its draw, whether
the token is sampled by the ordinary sampler or at a node of a tree. n = draws, V = vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rhymerl.backends.remote.wire import noise_of, num_tokens_of
from rhymerl.engine.device_draw import draw_with_logprobs
from rhymerl.engine.draw import chosen_logprobs, draw_tokens
from rhymerl.engine.noise import noise_counters, noise_keys_on_device
from rhymerl.engine.truncation import Truncation

_AT_ONCE = 2**24  # logits, on a CPU; to truncate each of them takes some 40 bytes


@dataclass(slots=True)
class Vocabulary:
    """The number of tokens that this process samples from, of one policy; not all batches keep their requests."""

    num_tokens: int | None = None  # None: all, as long as nobody has said anything else

    def follow(self, engine_requests: Iterable[Any]) -> None:
        """Go by what the requests of a batch say."""
        said = max((num_tokens_of(each.sampling_params.custom_params) for each in engine_requests), default=0)
        if said > (self.num_tokens or 0):
            self.num_tokens = said


VOCABULARY = Vocabulary()


def first_counter(engine_request: Any) -> int:
    """Return the number to which a position in the whole sequence is added, as a signed 64-bit number."""
    seed, offset = noise_of(engine_request.sampling_params.custom_params, str(engine_request.rid))
    counter = int(noise_counters(np.array([seed % 2**64], np.uint64))[0])
    prompt = len(engine_request.origin_input_ids) - offset
    unsigned = (counter + 1 - prompt) % 2**64  # a token is sampled at the position before its own
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


def draw(logits: Tensor, sampling_info: Any, positions: Tensor, *, each: int) -> tuple[Tensor, Tensor]:
    """Return the tokens sampled at `positions` [n] from clean logits [n, V], and their log-probs.

    Tokens are [n] int64, log-probs [n] float32 in nats. Each request owns `each` lines in a row. Log-probs are those of
    log_softmax(logits / T) without truncation.

    Noise and truncation only touch copies, of some lines at a time.
    """
    logits = logits[:, : VOCABULARY.num_tokens]
    top_ks = sampling_info.top_ks
    off = top_ks >= logits.shape[1]  # SGLang writes a huge number for all tokens
    settings = (
        sampling_info.temperatures.view(-1),
        torch.where(off, 0, top_ks),
        sampling_info.top_ps,
        sampling_info.min_ps,
    )
    temperature, top_k, top_p, min_p = (_spread(values, each) for values in settings)
    scales = 1.0 / temperature
    inverse = torch.where(top_k == 1, 0.0, scales)
    counters = _spread(sampling_info.sampling_seed, each) + positions.to(torch.int64)
    truncation = None
    if _truncates(sampling_info):
        truncation = Truncation(temperatures=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if logits.device.type != "cpu":
        return draw_with_logprobs(logits, counters, inverse, scales, truncation)
    lines = max(_AT_ONCE // logits.shape[-1], 1)
    parts = (slice(start, start + lines) for start in range(0, max(len(logits), 1), lines))
    draws = (logits, counters, inverse, scales)
    done = [_draw_on_cpu(truncation and truncation.part(part), *(values[part] for values in draws)) for part in parts]
    return torch.cat([tokens for tokens, _ in done]), torch.cat([logprobs for _, logprobs in done])


def _draw_on_cpu(
    rules: Truncation | None, logits: Tensor, counters: Tensor, inverse: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    clean = logits.float().contiguous()
    left = clean if rules is None else rules.apply(clean)
    keys = noise_keys_on_device(counters).numpy().astype(np.uint32)
    lines, tokens, logprobs = np.arange(len(clean)), np.empty(len(clean), np.int32), np.empty(len(clean))
    draw_tokens(left.numpy(), lines, inverse.double().numpy(), keys, tokens)
    chosen_logprobs(clean.numpy(), lines, scales.double().numpy(), tokens, logprobs)
    return torch.from_numpy(tokens).to(torch.int64), torch.from_numpy(logprobs).float()


def _truncates(sampling_info: Any) -> bool:
    has_top_k = sampling_info.need_top_k_sampling and not sampling_info.is_all_greedy  # greedy is top-k 1 here
    return bool(has_top_k or sampling_info.need_top_p_sampling or sampling_info.need_min_p_sampling)


@contextmanager
def without_seeds(batch: Any) -> Iterator[None]:
    """Context in which the batch is as SGLang made it: some of its ways of sampling refuse seeds."""
    info = batch.sampling_info
    if info is None:
        yield
        return
    batch.sampling_info = dataclasses.replace(info, sampling_seed=None)
    try:
        yield
    finally:
        batch.sampling_info = info


def _spread(values: Tensor, each: int) -> Tensor:
    return values if each == 1 else values.repeat_interleave(each)


def is_plain(sampling_info: Any) -> bool:
    """Return whether only temperature and truncation shape the draw, not penalties, biases, grammars or watermarks."""
    changed = ("acc_additive_penalties", "acc_scaling_penalties", "logit_bias")
    orchestrator = getattr(sampling_info, "penalizer_orchestrator", None)
    return (
        sampling_info.sampling_seed is not None
        and all(getattr(sampling_info, name, None) is None for name in changed)
        and not any(sampling_info.grammars or ())
        and not any(getattr(sampling_info, "return_sampling_masks", None) or ())
        and not sampling_info.has_custom_logit_processor
        and not getattr(sampling_info, "has_watermark_candidates", False)
        and not (orchestrator is not None and orchestrator.is_required)
    )
