"""Sample tokens from logits, with their log-probs. n = draws, M = logits of a pass, V = vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymerl.engine.device_draw import draw_with_logprobs
from rhymerl.engine.draw import chosen_logprobs, draw_tokens
from rhymerl.engine.noise import keys_at
from rhymerl.engine.rows import Rows
from rhymerl.engine.truncation import Truncation

if TYPE_CHECKING:
    from rhymerl.engine.layout import PassLayout
    from rhymerl.types import IndexArray


_FEW = 2**17  # logits: sampling from them all costs less than going back and forth between sampling and walking


class Sampler(Protocol):
    """Draws for one pass. Noise and truncation only ever touch copies of its logits [M, V]."""

    @property
    def draws_ahead(self) -> bool:
        """Return whether to draw at all indices at once, also at those that may not be reached."""

    def draw(self, indices: IndexArray, row: IndexArray, positions: IndexArray) -> npt.NDArray[np.int32]:
        """Return the target's own token at each of logits[indices], for rows `row` at response `positions`, [n]."""

    def logprobs(self, indices: IndexArray, row: IndexArray, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Return the untruncated log_softmax(logits / T)[token] at each index, [n], in nats; T = 0 uses 1.

        The tokens are those that were sampled there.
        """


class HostSampler:
    """Draws from logits in the host's memory, float32 or float64, by compiled code."""

    def __init__(self, logits: Tensor, rows: Rows) -> None:
        self._logits = logits
        self._rows = rows

    @property
    def draws_ahead(self) -> bool:
        return self._logits.numel() <= _FEW

    def draw(self, indices: IndexArray, row: IndexArray, positions: IndexArray) -> npt.NDArray[np.int32]:
        rows, logits = self._rows, self._logits
        keys, scale = keys_at(rows.counter[row], positions), rows.draw_scale[row]
        if rows.truncates[row].any():
            rules = Truncation(*map(torch.from_numpy, _rules(rows, row)))
            logits, indices = rules.apply(logits[torch.from_numpy(indices)]), np.arange(len(row))
        out = np.empty(len(indices), np.int32)
        draw_tokens(logits.numpy(), indices, scale, keys, out)
        return out

    def logprobs(self, indices: IndexArray, row: IndexArray, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        out = np.empty(len(indices))
        chosen_logprobs(self._logits.numpy(), indices, self._rows.logprob_scale[row], tokens, out)
        return out


class DeviceSampler:
    """Draws at every root and node of a pass in one call where the logits are, and waits for the device once.

    `draws` is what `draws_of` says of the pass, on that device.
    """

    draws_ahead = True

    def __init__(self, logits: Tensor, draws: Sequence[Tensor]) -> None:
        counters, scales, logprob_scales, *rules = draws
        found = draw_with_logprobs(logits, counters, scales, logprob_scales, Truncation(*rules) if rules else None)
        tokens, logprobs = torch.stack([each.double() for each in found]).cpu().numpy()
        self._tokens: npt.NDArray[np.int32] = tokens.astype(np.int32)
        self._logprobs: npt.NDArray[np.float64] = logprobs

    def draw(self, indices: IndexArray, row: IndexArray, positions: IndexArray) -> npt.NDArray[np.int32]:
        return self._tokens[indices]

    def logprobs(self, indices: IndexArray, row: IndexArray, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        return self._logprobs[indices]


def draws_of(layout: PassLayout, rows: Rows) -> list[npt.NDArray[Any]]:
    """Return a draw's inputs, each [M]: counters, scales of draw and log-prob, and rules if any row has some."""
    row = layout.row[layout.emits][layout.logit_row]
    positions = rows.length[row] - rows.prompt_length[row] + layout.logit_level
    counters = (rows.counter[row] + positions.astype(np.uint64)).view(np.int64)
    draws = [counters, rows.draw_scale[row], rows.logprob_scale[row]]
    return [*draws, *_rules(rows, row)] if rows.truncates[row].any() else draws


def _rules(rows: Rows, row: IndexArray) -> list[npt.NDArray[Any]]:
    """Return the fields of a `Truncation` for draws of these rows."""
    temperature = np.where(rows.temperature[row] > 0, rows.temperature[row], 1.0)
    return [temperature, rows.top_k[row], rows.top_p[row], rows.min_p[row]]
