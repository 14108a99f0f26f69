"""From logits to tokens and log-probs. n = draws, V = vocabulary."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymerl.engine.draw import draw_on_device, draw_tokens
from rhymerl.engine.noise import noise_keys
from rhymerl.engine.ragged import IndexArray
from rhymerl.engine.rows import Rows

_WIDE = 8192  # tokens
_BLOCK = 32_000  # tokens; torch computes more in parallel, which takes longer than it saves
_FEW = 2**17  # logits: drawing from them all costs less than going back and forth between drawing and walking
_NOTHING = -100.0  # halvings of the probability of the most likely token


def truncate(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """A copy of logits [n, V] with -inf where temperature, top-k, top-p and min-p (each [n]) rule a token out.

    Each rule sees the renormalised distribution that the one before it left; the most likely token always stays.
    """
    ordered, order = (logits / temperature[:, None]).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    keep = (top_k[:, None] == 0) | (rank < top_k[:, None])
    probabilities = ordered.masked_fill(~keep, float("-inf")).softmax(-1)
    # A sum of many rounded numbers reaches 1 before its end: with top-p 1 nothing may fall behind it.
    keep &= (probabilities.cumsum(-1) - probabilities < top_p[:, None]) | (top_p[:, None] >= 1)
    keep &= probabilities >= min_p[:, None] * probabilities[:, :1]
    keep[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter_(-1, order, keep), float("-inf"))


class Sampler:
    """Draws for one pass: `logits` [M, V] clean, float32 or float64; noise and truncation only ever touch copies."""

    def __init__(self, logits: Tensor, rows: Rows) -> None:
        self._logits = logits
        self._rows = rows

    @property
    def draws_ahead(self) -> bool:
        """Whether to draw at all places at once, also at those that may not be reached."""
        return self._logits.numel() <= _FEW

    def draw(self, places: IndexArray, row: IndexArray, positions: IndexArray) -> npt.NDArray[np.int32]:
        """The target's own token at each of logits[places], for rows `row` at response `positions`; each [n]."""
        rows = self._rows
        keys = noise_keys(rows.seed[row], positions)
        inverse = np.divide(1.0, rows.temperature[row], out=np.zeros(len(row)), where=rows.temperature[row] > 0)
        logits, places = self._truncated(places, row)
        if logits.device.type == "cpu":
            out = np.empty(len(places), np.int32)
            draw_tokens(logits.numpy(), places, inverse, keys, out)
            return out
        scale = torch.from_numpy(inverse).to(logits.device)
        drawn = draw_on_device(logits[_index(places, logits)], scale, _index(keys, logits))
        return drawn.to(torch.int32).cpu().numpy()

    def _truncated(self, places: IndexArray, row: IndexArray) -> tuple[Tensor, IndexArray]:
        """The logits to draw from and where in them; a copy of the needed lines if a row truncates."""
        rows = self._rows
        settings = (rows.top_k[row], rows.top_p[row], rows.min_p[row])
        if not (settings[0].any() or (settings[1] < 1).any() or settings[2].any()):
            return self._logits, places
        lines = self._logits[_index(places, self._logits)]
        temperature = np.where(rows.temperature[row] > 0, rows.temperature[row], 1.0)
        top_k, top_p, min_p = (torch.from_numpy(each).to(lines.device) for each in settings)
        kept = truncate(lines, torch.from_numpy(temperature).to(lines), top_k, top_p.to(lines), min_p.to(lines))
        return kept, np.arange(len(places))

    def logprobs(self, places: IndexArray, row: IndexArray, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Untruncated log_softmax(logits / T)[token] at each place, [n], in nats; T = 0 uses 1."""
        logits = self._logits
        temperature = self._rows.temperature[row]
        inverse = np.divide(1.0, temperature, out=np.ones(len(row)), where=temperature > 0)
        scale, index = torch.from_numpy(inverse).to(logits.device), _index(places, logits)
        if logits.device.type == "cpu" and logits.shape[1] > _WIDE:
            # Line by line, what the reduction needs besides stays in the cache.
            lines = zip(places, scale.split(1), strict=True)
            norm = torch.cat([log_norms(logits[i : i + 1], s, block=_BLOCK) for i, s in lines])
        else:
            norm = log_norms(logits[index], scale, block=logits.shape[1])
        return (logits[index, _index(tokens, logits)].double() * scale - norm).cpu().numpy()


def log_norms(logits: Tensor, scale: Tensor, *, block: int) -> Tensor:
    """logsumexp(logits * scale) of each line, [n] float64, from logits [n, V] and scale [n] float64, `block` tokens at a time."""
    parts = logits.split(block, -1)
    top = torch.stack([part.amax(-1) for part in parts]).amax(0)
    # In powers of two, which torch computes four times as fast on a CPU. Those of less than _NOTHING are too small for a
    # float32's exponent, which costs several times as much, and they add nothing.
    binary = (scale / math.log(2)).to(logits)[:, None]
    scores = ((part - top[:, None]).mul_(binary).clamp_(min=_NOTHING) for part in parts)
    total = torch.stack([each.exp2_().sum(-1, dtype=torch.float64) for each in scores]).sum(0)
    return top.double() * scale + total.log()


def _index(values: npt.NDArray[np.integer], like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(like.device)
