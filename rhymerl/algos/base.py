"""The interface of algorithms: advantages from a step's samples, and a loss that sums correctly over any split of them.

B = samples, T = response tokens (padded to the longest). Log-probs are in nats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

Need = Literal["proximal", "proximal_in_loss", "reference", "divergence", "values", "final_values", "entropy_gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples in canonical order, without their prompts; padding is False in `mask`."""

    rewards: Tensor  # [B]
    groups: Tensor  # [B] int64, equal for the samples of one prompt
    mask: Tensor  # [B, T] bool, tokens that are trained
    behaviour_logprobs: Tensor  # [B, T] of the policies that sampled the tokens
    limits: Tensor  # [B] int64, the most tokens that each answer could have had
    is_truncated: Tensor  # [B] bool, cut off at its limit
    is_stale: Tensor | None = None  # [B, T] bool, sampled by earlier weights than those of the step; None: no token
    log_masses: Tensor | None = None  # [B, T] of what truncation left to sample from; None: not known
    turn_rewards: Tensor | None = None  # [B, T] the part of `rewards` that turns earned, at their last tokens
    proximal_logprobs: Tensor | None = None  # [B, T] before the first update; None: as behaviour
    reference_logprobs: Tensor | None = None  # [B, T] of the policy that the run started from, or a teacher
    values: Tensor | None = None  # [B, T] the critic's, in front of each token, before the first update
    final_values: Tensor | None = None  # [B] the critic's, behind the last token
    divergence: Tensor | None = None  # [B] nats from the reference, of an answer's trained tokens
    advantages: Tensor | None = None  # [B, T]
    returns: Tensor | None = None  # [B, T] what the critic learns
    awaits_proximal: Tensor | None = (
        None  # [B] bool, whose `proximal_logprobs` the update's own pass finds, for the loss
    )

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def old_logprobs(self) -> Tensor:
        """Return the log-probs of the policy at the start of the step, [B, T].

        They are `proximal_logprobs` if there are any, else `behaviour_logprobs`. Raises ValueError before the loss of
        an algorithm that `needs` them in the loss alone.
        """
        if self.awaits_proximal is not None:
            raise ValueError(
                "old_logprobs are read before the loss: an algorithm that does so needs proximal, not proximal_in_loss"
            )
        return self.behaviour_logprobs if self.proximal_logprobs is None else self.proximal_logprobs

    @property
    def lengths(self) -> Tensor:
        """Return the trained tokens of each sample, [B]."""
        return self.mask.sum(-1)

    def after_update(self) -> Self:
        """Return the batch once the weights have moved; where nothing else is known, tokens are compared with these."""
        return self if self.proximal_logprobs is not None else replace(self, is_stale=torch.ones_like(self.mask))

    def select(self, index: Tensor, width: int) -> Self:
        """Return the samples at `index`, cut to their first `width` tokens."""
        return self._each(lambda value: value[index][:, :width] if value.ndim == 2 else value[index])

    def cast(self, dtype: torch.dtype) -> Self:
        """Return per-token values in the dtype of the loss."""
        return self._each(lambda value: value.to(dtype) if value.ndim == 2 and value.is_floating_point() else value)

    def to(self, device: torch.device | str) -> Self:
        """Return the batch on a device."""
        return self._each(lambda value: value.to(device))

    def _each(self, change: Any) -> Self:
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(value) for name, value in held.items() if isinstance(value, Tensor)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Denominators of sums over the whole mini-batch and all ranks.

    With them the parts of any split add up to one loss.
    """

    num_tokens: int  # trained tokens, at least 1
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutput:
    """The outputs of the current policy, and of the critic, for a batch's tokens."""

    logprobs: Tensor  # [B, T] log_softmax(logits / temperature), with gradient
    entropy: Tensor  # [B, T] with gradient only for an algorithm that trains it
    values: Tensor | None = None  # [B, T] of the critic, with gradient
    divergence: Tensor | None = None  # [B, T] KL(policy || reference) over all tokens, with gradient


class Algorithm(ABC):
    """An algorithm; its constructor's arguments are its settings.

    Metrics are summed over micro-batches and ranks, so each is a sum over tokens or samples divided by one of the
    `Totals`; names ending in `/min` and `/max` are combined by minimum and maximum instead.
    """

    @abstractmethod
    def advantages(self, batch: Batch) -> Tensor:
        """Return [B, T] from all rewards and what it `needs`; on the CPU in float64, once a step on every rank."""

    @abstractmethod
    def loss(self, batch: Batch, output: PolicyOutput, totals: Totals) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the part of the mini-batch's loss that these samples add, and metrics."""

    @property
    def needs(self) -> frozenset[Need]:
        """Return the inputs that cost time or memory.

        Most take forward passes over all samples before the first update. `proximal` are the `old_logprobs`,
        `proximal_in_loss` too where only the loss reads them: if a step has only one update, that update's own pass
        says what they are. `reference` makes the run keep a frozen copy of the policy, or a teacher, `values` a critic;
        `final_values` is for algorithms that need `values`, whose pass finds both. `divergence` has the reference
        computed in the loss, for `output.divergence`. With `entropy_gradient` the loss has one through
        `output.entropy`.
        """
        return frozenset()

    @property
    def reads_reference(self) -> bool:
        """Return whether the run has to have a reference."""
        return bool(self.needs & {"reference", "divergence"})

    @property
    def needs_teacher(self) -> bool:
        """Return whether this reference has to be another model than the policy that the run started from."""
        return False

    @property
    def learns_from_rewards(self) -> bool:
        """Return whether a run needs rewards, and a sample without one teaches nothing."""
        return True

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with `advantages`, and with `returns` for a critic; on the CPU, once a step on every rank.

        Tokens taken out of its `mask` leave the loss and the `Totals`.
        """
        return replace(batch, advantages=self.advantages(batch))

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Return metrics of a whole step; it is called once a step on every rank, after its updates.

        `batch` is as `prepare` returned it.
        """
        return {}

    def adapt(self, batch: Batch) -> None:
        """Adapt settings, after `metrics` of a step in which the policy was trained, on every rank."""

    @property
    def may_stop(self) -> bool:
        """Return whether to ask `stops`, which takes a collective after each mini-batch."""
        return type(self).stops is not Algorithm.stops

    def stops(self, metrics: Mapping[str, float]) -> bool:
        """Return whether to skip the step's other mini-batches, given the last one's metrics over all ranks."""
        return False

    def check(self, *, group_size: int) -> None:
        """Raise ValueError, which names `group_size`, when the algorithm cannot work with groups of this size."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain containers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
