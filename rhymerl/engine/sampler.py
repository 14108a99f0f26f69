"""Sample tokens from logits, with their log-probs. n = draws, V = vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymerl.engine.draw import chosen_logprobs, draw_on_device, draw_tokens
from rhymerl.engine.noise import keys_at
from rhymerl.engine.ragged import IndexArray
from rhymerl.engine.rows import Rows

_FEW = 2**17  # logits: sampling from them all costs less than going back and forth between sampling and walking


def truncate(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return a copy of logits [n, V] with -inf where temperature, top-k, top-p and min-p (each [n]) rule a token out.

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
        """Return whether to draw at all indices at once, also at those that may not be reached."""
        return self._logits.numel() <= _FEW

    def draw(self, indices: IndexArray, row: IndexArray, positions: IndexArray) -> npt.NDArray[np.int32]:
        """Return the target's own token at each of logits[indices], for rows `row` at response `positions`, [n]."""
        rows = self._rows
        keys, scale = keys_at(rows.counter[row], positions), rows.draw_scale[row]
        logits = self._logits
        if rows.truncates[row].any():
            logits, indices = self._truncated(indices, row), np.arange(len(indices))
        if logits.device.type == "cpu":
            out = np.empty(len(indices), np.int32)
            draw_tokens(logits.numpy(), indices, scale, keys, out)
            return out
        scales = torch.from_numpy(scale).to(logits.device)
        sampled = draw_on_device(logits[_index(indices, logits)], scales, _index(keys, logits))
        return sampled.to(torch.int32).cpu().numpy()

    def _truncated(self, indices: IndexArray, row: IndexArray) -> Tensor:
        """Return a copy of the logits at these indices, truncated, [n, V]."""
        rows, lines = self._rows, self._logits[_index(indices, self._logits)]
        temperature = np.where(rows.temperature[row] > 0, rows.temperature[row], 1.0)
        top_k, *others = rows.top_k[row], temperature, rows.top_p[row], rows.min_p[row]
        temperatures, top_p, min_p = (torch.from_numpy(each).to(lines) for each in others)
        return truncate(lines, temperatures, torch.from_numpy(top_k).to(lines.device), top_p, min_p)

    def logprobs(self, indices: IndexArray, row: IndexArray, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Return the untruncated log_softmax(logits / T)[token] at each index, [n], in nats; T = 0 uses 1."""
        logits, scale = self._logits, self._rows.logprob_scale[row]
        if logits.device.type == "cpu":
            out = np.empty(len(indices))
            chosen_logprobs(logits.numpy(), indices, scale, tokens, out)
            return out
        scales, index = torch.from_numpy(scale).to(logits.device), _index(indices, logits)
        norm = log_norms(logits[index], scales)
        return (logits[index, _index(tokens, logits)].double() * scales - norm).cpu().numpy()


def log_norms(logits: Tensor, scale: Tensor) -> Tensor:
    """Return logsumexp(logits * scale) of each line, [n] float64, from logits [n, V] and scale [n] float64."""
    top = logits.amax(-1)
    terms = (logits - top[:, None]).mul_(scale.to(logits)[:, None]).exp_()
    return top.double() * scale + terms.sum(-1, dtype=torch.float64).log()


def _index(values: npt.NDArray[np.integer], like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(like.device)
