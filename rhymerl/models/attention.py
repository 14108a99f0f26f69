"""What a layer needs of attention beside the causal mask: a window, scores that are soft-capped, sinks.

Nothing is read from a model's config. Each layer says what it needs when it calls transformers' attention interface,
and proofs compare that with the model's own forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_SHORT_WINDOW = 3  # positions: of a window in proofs, whose sequences are short


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerAttention:
    """What the attention of a layer is beside causal."""

    window: int | None = None  # positions that a token sees, its own among them; None = all
    softcap: float | None = None  # c: a score s counts as c tanh(s / c)
    sinks: Tensor | None = None  # [heads] the score of a key without a value, which takes its share of each softmax

    @classmethod
    def of(cls, window: int | None, softcap: float | None, sinks: Tensor | None) -> LayerAttention:
        """Return it for what a layer hands to transformers' attention interface."""
        if window is None and softcap is None and sinks is None:
            return FULL
        return cls(window=window, softcap=softcap, sinks=sinks)

    @property
    def needs_scores(self) -> bool:
        """Return whether scores are changed before their softmax, which torch's own attention cannot do."""
        return self.softcap is not None or self.sinks is not None


FULL = LayerAttention()


def last_seen(visible: Tensor, window: int) -> Tensor:
    """Return which keys a window leaves of the visible ones, bool [..., keys], in the order of their positions.

    The keys that a token sees have one position each, up to its own. So a window of positions is as many of the last
    ones, wherever they are stored and whatever stands between them.
    """
    return visible & (visible.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1) <= window)


def attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    mask: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with scores written out: [..., Q, dim], [..., S, dim] -> [..., Q, dim].

    Masks and sinks can be expanded to [..., Q, S] and [..., Q, 1].
    """
    scores = (query * scale) @ key.transpose(-1, -2)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights[..., : key.shape[-2]].to(value.dtype) @ value


@contextmanager
def narrowed(model: PreTrainedModel, longest_tokens: float = math.inf) -> Iterator[None]:
    """Context in which a model's window is so narrow that it shows in a short sequence.

    A window that `longest_tokens` do not reach stays as it is. The model's own masks and its layers follow the config
    and the modules. A model in which only some of these do is found out.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    owners: list[Any] = [
        config,
        *(each for each in model.modules() if getattr(each, "sliding_window", None) is not None),
    ]
    if not window or window >= longest_tokens:
        owners = []
    before = [each.sliding_window for each in owners]
    try:
        for each in owners:
            each.sliding_window = _SHORT_WINDOW
        yield
    finally:
        for each, own in zip(owners, before, strict=True):
            each.sliding_window = own
