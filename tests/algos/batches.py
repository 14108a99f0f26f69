"""Random batches in float64 with ragged masks, and what a policy says of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rhymerl.algos import Algorithm, Batch, PolicyOutput, Totals

NUM_SAMPLES, WIDTH = 6, 5


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_batch(seed: int = 0) -> tuple[Batch, Tensor]:
    """Three pairs; each policy has moved a little from the one before. Returns log-probs of the current one too."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([5, 2, 3, 1, 4, 5])
    behaviour = -torch.rand(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64) - 0.5
    proximal = behaviour + noise(0.5)
    batch = Batch(
        rewards=torch.rand(NUM_SAMPLES, generator=generator, dtype=torch.float64),
        groups=torch.arange(NUM_SAMPLES) // 2,
        mask=torch.arange(WIDTH) < lengths[:, None],
        behaviour_logprobs=behaviour,
        proximal_logprobs=proximal,
        reference_logprobs=behaviour + noise(0.2),
        values=noise(1.0),
        limits=torch.tensor([5, 5, 7, 7, 6, 6]),
        is_truncated=torch.tensor([True, False, False, False, False, False]),
    )
    return batch, proximal + noise(0.3)


def totals_of(batch: Batch) -> Totals:
    return Totals(num_tokens=max(1, int(batch.mask.sum())), num_samples=len(batch))


def output_of(logprobs: Tensor, entropy: Tensor | None = None, values: Tensor | None = None) -> PolicyOutput:
    """Entropy, and values, that follow from the log-probs unless they are given."""
    entropy = logprobs**2 if entropy is None else entropy
    return PolicyOutput(logprobs=logprobs, entropy=entropy, values=logprobs.cos() if values is None else values)


def loss_of(algorithm: Algorithm, batch: Batch, logprobs: Tensor, totals: Totals | None = None) -> Tensor:
    return algorithm.loss(batch, output_of(logprobs), totals or totals_of(batch))[0]


def with_advantages(batch: Batch, advantages: Tensor) -> Batch:
    return replace(batch, advantages=advantages, returns=advantages)
