"""Sample tokens from logits, with their log-probs. n = draws, M = logits of a pass, V = vocabulary."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymerl.engine.device_draw import draw_with_logprobs, log_masses
from rhymerl.engine.draw import chosen_logprobs, draw_tokens
from rhymerl.engine.layout import PassLayout
from rhymerl.engine.noise import keys_at
from rhymerl.engine.rows import Rows
from rhymerl.engine.truncation import Truncation
from rhymerl.types import FloatArray, IndexArray, IntArray

_FEW = 2**17  # logits: sampling from them all costs less than going back and forth between sampling and walking


class Sampler(Protocol):
    """Draws for one pass. Noise and truncation only ever touch copies of its logits [M, V]."""

    @property
    def draws_ahead(self) -> bool:
        """Return whether to draw at all indices at once, also at those that may not be reached."""

    def draw(self, indices: IndexArray, row: IndexArray, positions: IndexArray) -> npt.NDArray[np.int32]:
        """Return the target's own token at each of logits[indices], for rows `row` at response `positions`, [n]."""

    def logprobs(self, indices: IndexArray, row: IndexArray, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Return the log_softmax(logits / T)[token] at each index, [n], in nats; T = 0 uses 1.

        The tokens are those that were sampled there. It is over what truncation left for rows that replay, else over
        all tokens.
        """

    def kept(self, indices: IndexArray) -> list[IntArray]:
        """Return the ids that truncation left at each index, of rows that replay and have been sampled there."""

    def log_masses(self, indices: IndexArray) -> npt.NDArray[np.float64]:
        """Return the log of the probability that all of these ids had together, of the same rows, [n]."""


class HostSampler:
    """Draws from logits in the host's memory, float32 or float64, by compiled code."""

    def __init__(self, logits: Tensor, rows: Rows) -> None:
        self._logits = logits
        self._rows = rows
        self._left: dict[int, Tensor] = {}  # logits [V] of rows that replay, by index
        self._log_masses: dict[int, float] = {}  # of what is left there

    @property
    def draws_ahead(self) -> bool:
        return self._logits.numel() <= _FEW

    def draw(self, indices: IndexArray, row: IndexArray, positions: IndexArray) -> npt.NDArray[np.int32]:
        rows, logits = self._rows, self._logits
        keys, scale = keys_at(rows.counter[row], positions), rows.draw_scale[row]
        if rows.truncates[row].any():
            rules = Truncation(*map(torch.from_numpy, _rules(rows, row)))
            logits = rules.apply(logits[torch.from_numpy(indices)])
            # Truncated again they might round to another set, in which the sampled token may be missing.
            self._left |= {int(indices[i]): logits[i] for i in np.flatnonzero(rows.replays[row])}
            indices = np.arange(len(row))
        out = np.empty(len(indices), np.int32)
        draw_tokens(logits.numpy(), indices, scale, keys, out)
        return out

    def logprobs(self, indices: IndexArray, row: IndexArray, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        out = np.empty(len(indices))
        scale = self._rows.logprob_scale[row]
        chosen_logprobs(self._logits.numpy(), indices, scale, tokens, out)
        for i in np.flatnonzero(self._rows.replays[row]).tolist() if self._left else ():
            left, of_all = self._left[int(indices[i])].double() * scale[i], out[i]
            out[i] = left[tokens[i]] - left[left > -math.inf].logsumexp(0)
            self._log_masses[int(indices[i])] = of_all - out[i]
        return out

    def kept(self, indices: IndexArray) -> list[IntArray]:
        return [_ids_left(self._left[index]) for index in indices.tolist()]

    def log_masses(self, indices: IndexArray) -> npt.NDArray[np.float64]:
        return np.array([self._log_masses[index] for index in indices.tolist()])


class DeviceSampler:
    """Draws at every root and node of a pass in one call where the logits are; who first asks for a token waits, once.

    `draws` is what `draws_of` says of the pass, on that device.
    """

    draws_ahead = True

    def __init__(self, logits: Tensor, draws: Sequence[Tensor]) -> None:
        counters, scales, logprob_scales, *rules = draws
        truncation, masses = Truncation(*rules[:4]) if rules else None, list[Tensor]()
        if truncation is not None and len(rules) > 4:
            whole, (logits, truncation) = logits, truncation.ahead(logits, rules[4])
            self._left, masses = logits, [log_masses(logits, whole, logprob_scales)]
        found = draw_with_logprobs(logits, counters, scales, logprob_scales, truncation)
        self._on_device = torch.stack([each.double() for each in (*found, *masses)])

    @functools.cached_property
    def _on_host(self) -> list[FloatArray]:
        """Wait for tokens, log-probs and, if any row replays, the log of what truncation left; [M] each."""
        return [*self._on_device.cpu().numpy()]

    def draw(self, indices: IndexArray, row: IndexArray, positions: IndexArray) -> npt.NDArray[np.int32]:
        return self._on_host[0][indices].astype(np.int32)

    def logprobs(self, indices: IndexArray, row: IndexArray, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        return self._on_host[1][indices]

    def kept(self, indices: IndexArray) -> list[IntArray]:
        return [_ids_left(each) for each in self._left[torch.from_numpy(indices).to(self._left.device)].cpu()]

    def log_masses(self, indices: IndexArray) -> npt.NDArray[np.float64]:
        return self._on_host[2][indices]


def draws_of(layout: PassLayout, rows: Rows) -> list[npt.NDArray[Any]]:
    """Return a draw's inputs, each [M]: counters, scales of draw and log-prob.

    If any row has rules, also these, and if any replays, which do.
    """
    row = layout.emitting[layout.logit_row]
    positions = rows.length[row] - rows.prompt_length[row] + layout.logit_level
    counters = (rows.counter[row] + positions.astype(np.uint64)).view(np.int64)
    draws: list[npt.NDArray[Any]] = [counters, rows.draw_scale[row], rows.logprob_scale[row]]
    if rows.truncates[row].any():
        draws += [*_rules(rows, row), *([rows.replays[row]] if rows.replays[row].any() else [])]
    return draws


def _ids_left(left: Tensor) -> IntArray:
    """Return the ids that may be sampled, from truncated logits [V]."""
    return (left > -math.inf).numpy().nonzero()[0].astype(np.int32)


def _rules(rows: Rows, row: IndexArray) -> list[npt.NDArray[Any]]:
    """Return the fields of a `Truncation` for draws of these rows."""
    temperature = np.where(rows.temperature[row] > 0, rows.temperature[row], 1.0)
    return [temperature, rows.top_k[row], rows.top_p[row], rows.min_p[row]]
