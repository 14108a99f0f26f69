"""What an algorithm is: advantages from a step's samples, and a loss that sums correctly over any split of them.

B = samples, T = response tokens (padded to the longest).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples in canonical order, without their prompts; padding is False in `mask`."""

    rewards: Tensor  # [B]
    groups: Tensor  # [B] int64, equal for the samples of one prompt
    mask: Tensor  # [B, T] bool, tokens that are trained
    behaviour_logprobs: Tensor  # [B, T] of the policy that drew the tokens
    advantages: Tensor | None = None  # [B, T]
    reference_logprobs: Tensor | None = None  # [B, T]

    def __len__(self) -> int:
        return len(self.rewards)

    def select(self, index: Tensor, width: int) -> Self:
        """The samples at `index`, cut to their first `width` tokens."""
        chosen = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                value = value[index]
                chosen[field.name] = value[:, :width] if value.ndim == 2 else value
        return replace(self, **chosen)

    def cast(self, dtype: torch.dtype) -> Self:
        """Advantages and behaviour log-probs in the dtype of the loss."""
        advantages = None if self.advantages is None else self.advantages.to(dtype)
        return replace(self, advantages=advantages, behaviour_logprobs=self.behaviour_logprobs.to(dtype))

    def with_reference(self, logprobs: Tensor) -> Self:
        """The same with `reference_logprobs` [B, T]."""
        return replace(self, reference_logprobs=logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """What the current policy says of a batch's tokens."""

    logprobs: Tensor  # [B, T] log_softmax(logits / temperature), with gradient
    entropy: Tensor  # [B, T]


class Algorithm(ABC):
    """Stateless; its constructor's arguments are its settings.

    Metrics are summed over micro-batches, so each is a sum over tokens divided by `num_tokens`; names ending in
    `/min` and `/max` are combined by minimum and maximum instead.
    """

    @abstractmethod
    def advantages(self, batch: Batch) -> Tensor:
        """[B, T] from the whole step's rewards."""

    @abstractmethod
    def loss(self, batch: Batch, output: PolicyOutput, num_tokens: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The part of the loss that these samples add, and metrics.

        `num_tokens` counts the trained tokens of the whole mini-batch over all ranks, so that the parts of any split sum
        to the same loss.
        """

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads `reference_logprobs`."""
        return False

    def check(self, *, group_size: int) -> None:
        """Raise ConfigError when the algorithm cannot work with groups of this size."""
