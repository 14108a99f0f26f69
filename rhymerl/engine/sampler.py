"""Sample tokens from logits, with their log-probs. n = draws, V = vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymerl.engine.device_draw import draw_with_logprobs, log_norms
from rhymerl.engine.draw import chosen_logprobs, draw_tokens
from rhymerl.engine.noise import keys_at
from rhymerl.engine.ragged import IndexArray
from rhymerl.engine.rows import Rows
from rhymerl.engine.truncation import Truncation

_FEW = 2**17  # logits: sampling from them all costs less than going back and forth between sampling and walking


class Sampler:
    """Draws for one pass: `logits` [M, V] clean, float32 or float64; noise and truncation only ever touch copies."""

    def __init__(self, logits: Tensor, rows: Rows) -> None:
        self._logits = logits
        self._rows = rows
        self._sampled = np.full(0, -1, np.int32)  # [M] on an accelerator, which finds tokens and log-probs at once
        self._sampled_logprobs = np.empty(0)

    @property
    def draws_ahead(self) -> bool:
        """Return whether to draw at all indices at once, also at those that may not be reached."""
        return self._logits.numel() <= _FEW

    def draw(self, indices: IndexArray, row: IndexArray, positions: IndexArray) -> npt.NDArray[np.int32]:
        """Return the target's own token at each of logits[indices], for rows `row` at response `positions`, [n]."""
        if self._logits.device.type != "cpu":
            return self._draw_on_device(indices, row, positions)
        rows, logits = self._rows, self._logits
        keys, scale = keys_at(rows.counter[row], positions), rows.draw_scale[row]
        if rows.truncates[row].any():
            lines = logits[_index(indices, logits)]
            logits, indices = self._truncation(row).apply(lines), np.arange(len(row))
        out = np.empty(len(indices), np.int32)
        draw_tokens(logits.numpy(), indices, scale, keys, out)
        return out

    def _draw_on_device(self, indices: IndexArray, row: IndexArray, positions: IndexArray) -> npt.NDArray[np.int32]:
        """Return the same, and keep the log-probs, which come with it."""
        rows, logits = self._rows, self._logits
        whole = len(indices) == len(logits) and bool((indices == np.arange(len(logits))).all())
        sampled, logprobs = draw_with_logprobs(
            logits if whole else logits[_index(indices, logits)],
            torch.from_numpy((rows.counter[row] + positions.astype(np.uint64)).view(np.int64)).to(logits.device),
            torch.from_numpy(rows.draw_scale[row]).to(logits.device),
            torch.from_numpy(rows.logprob_scale[row]).to(logits.device),
            self._truncation(row) if rows.truncates[row].any() else None,
        )
        both = torch.stack([sampled.double(), logprobs.double()]).cpu().numpy()  # one transfer
        if not len(self._sampled):
            self._sampled, self._sampled_logprobs = np.full(len(logits), -1, np.int32), np.full(len(logits), np.nan)
        self._sampled[indices], self._sampled_logprobs[indices] = both[0].astype(np.int32), both[1]
        return self._sampled[indices]

    def _truncation(self, row: IndexArray) -> Truncation:
        rows, device = self._rows, self._logits.device
        temperatures = np.where(rows.temperature[row] > 0, rows.temperature[row], 1.0)
        given = (temperatures, rows.top_k[row], rows.top_p[row], rows.min_p[row])
        temperature, top_k, top_p, min_p = (torch.from_numpy(each).to(device) for each in given)
        return Truncation(temperatures=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

    def logprobs(self, indices: IndexArray, row: IndexArray, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Return the untruncated log_softmax(logits / T)[token] at each index, [n], in nats; T = 0 uses 1."""
        logits, scale = self._logits, self._rows.logprob_scale[row]
        if logits.device.type == "cpu":
            out = np.empty(len(indices))
            chosen_logprobs(logits.numpy(), indices, scale, tokens, out)
            return out
        if len(self._sampled) and np.array_equal(self._sampled[indices], tokens):
            return self._sampled_logprobs[indices]
        scales, index = torch.from_numpy(scale).to(logits.device), _index(indices, logits)
        norm = log_norms(logits[index], scales)
        return (logits[index, _index(tokens, logits)].double() * scales - norm).cpu().numpy()


def _index(values: npt.NDArray[np.integer], like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(like.device)
