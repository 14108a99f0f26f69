"""The draw with its log-probs where the logits are: Triton's kernels on a CUDA device, the same in torch on any other.

The torch form is the reference of the kernels, and takes what these do not, float64. n = draws, V = vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch
from torch import Tensor

from rhymerl.engine.noise import log_race_times, noise_keys_on_device
from rhymerl.engine.truncation import AT_ONCE, Truncation

log = logging.getLogger(__name__)


def draw_with_logprobs(
    logits: Tensor,
    counters: Tensor,
    inverse_temperatures: Tensor,
    logprob_scales: Tensor,
    truncation: Truncation | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the tokens that `draw_tokens` draws, [n] int64, and their log-probs, [n] in nats, from logits [n, V].

    `counters` [n] int64 are those of the noise plus the response positions. An inverse temperature [n] of 0 is greedy.
    Log-probs are those of log_softmax(logits * scale) without truncation, float32 within 1e-5, or float64 where the
    logits are. -inf marks tokens that may not be sampled; where none may, the token is 0 and its log-prob NaN.
    """
    if logits.is_cuda and logits.dtype != torch.float64 and _has_triton():
        from rhymerl.engine import triton_draw

        return triton_draw.draw_with_logprobs(logits, counters, inverse_temperatures, logprob_scales, truncation)
    return draw_in_torch(logits, counters, inverse_temperatures, logprob_scales, truncation)


def draw_in_torch(
    logits: Tensor,
    counters: Tensor,
    inverse_temperatures: Tensor,
    logprob_scales: Tensor,
    truncation: Truncation | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the same in torch on any device, some rows at a time."""
    rows = max(AT_ONCE // logits.shape[-1], 1)
    parts = [slice(start, start + rows) for start in range(0, max(len(logits), 1), rows)]
    draws = (logits, counters, inverse_temperatures, logprob_scales)
    done = [_some_in_torch(truncation and truncation.part(part), *(each[part] for each in draws)) for part in parts]
    return torch.cat([tokens for tokens, _ in done]), torch.cat([logprobs for _, logprobs in done])


@functools.cache
def _has_triton() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        log.warning("triton is not installed: tokens are sampled in torch, which is slower and takes more memory")
    return found


def _some_in_torch(
    rules: Truncation | None, logits: Tensor, counters: Tensor, scales: Tensor, logprob_scales: Tensor
) -> tuple[Tensor, Tensor]:
    left = logits = _in_full(logits)
    if rules is not None:
        left = rules.apply(logits)
    scale, logprob_scales = scales.double()[:, None], logprob_scales.double()
    scores = left.double() * torch.where(scale > 0, scale, 1.0)
    times = log_race_times(noise_keys_on_device(counters), logits.shape[-1])
    tokens = (scores - torch.where(scale > 0, times, 0.0)).argmax(-1)
    chosen = logits.gather(-1, tokens[:, None])[:, 0].double()
    return tokens, (chosen * logprob_scales - log_norms(logits, logprob_scales)).to(logits)


def log_masses(left: Tensor, logits: Tensor, scale: Tensor) -> Tensor:
    """Return the log of the probability that is `left` of logits, both [n, V]; [n] float64, some rows at a time."""
    rows = max(AT_ONCE // logits.shape[-1], 1)
    parts = zip(*(each.split(rows) for each in (left, logits, scale.double())), strict=True)
    return torch.cat([log_norms(_in_full(some), by) - log_norms(_in_full(whole), by) for some, whole, by in parts])


def _in_full(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def log_norms(logits: Tensor, scale: Tensor) -> Tensor:
    """Return logsumexp(logits * scale) of each line, [n] float64, from logits [n, V] and scale [n] float64."""
    top = logits.amax(-1)
    terms = (logits - top[:, None]).mul_(scale.to(logits)[:, None]).exp_()
    return top.double() * scale + terms.sum(-1, dtype=torch.float64).log()
