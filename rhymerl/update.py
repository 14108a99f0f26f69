"""The update: a step's samples become optimizer steps. Mini-batch = one optimizer step, micro-batch = one backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from rhymerl.algos.base import Algorithm, Batch
from rhymerl.dealing import deal
from rhymerl.errors import ConfigError, RunError, require_at_least
from rhymerl.logprobs import policy_output, token_batch
from rhymerl.ranks.base import Alone, Ranks
from rhymerl.types import Sample

Schedule = Literal["constant", "linear", "cosine"]


class UpdateSettings:
    """Optimizer and batch settings.

    AdamW at `learning_rate`, after `warmup_steps` following `lr_schedule` down to `min_lr_ratio` of it at the run's
    last step. A step's samples make `mini_batches` optimizer steps; a backward takes at most `micro_batch_tokens`
    tokens, padding included. `chunk_tokens` bounds the logits held at a time (None: 64 MiB of them).
    `max_grad_norm` 0 clips nothing.
    """

    def __init__(
        self,
        *,
        learning_rate: float = 1e-6,
        lr_schedule: Schedule = "constant",
        warmup_steps: int = 0,
        min_lr_ratio: float = 0.0,
        weight_decay: float = 0.0,
        betas: Sequence[float] = (0.9, 0.999),
        max_grad_norm: float = 1.0,
        mini_batches: int = 1,
        micro_batch_tokens: int = 16_384,
        chunk_tokens: int | None = None,
    ) -> None:
        at_least = {
            "learning_rate": (learning_rate, 0),
            "warmup_steps": (warmup_steps, 0),
            "min_lr_ratio": (min_lr_ratio, 0),
            "weight_decay": (weight_decay, 0),
            "max_grad_norm": (max_grad_norm, 0),
            "mini_batches": (mini_batches, 1),
            "micro_batch_tokens": (micro_batch_tokens, 1),
            "chunk_tokens": (1 if chunk_tokens is None else chunk_tokens, 1),
        }
        require_at_least("update", at_least)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"update.betas={list(betas)}: expected two numbers in [0, 1)")
        if lr_schedule not in ("constant", "linear", "cosine"):
            raise ConfigError(f"update.lr_schedule={lr_schedule!r}: expected constant, linear or cosine")
        self.learning_rate = learning_rate
        self.lr_schedule = lr_schedule
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio
        self.weight_decay = weight_decay
        self.betas = tuple(betas)
        self.max_grad_norm = max_grad_norm
        self.mini_batches = mini_batches
        self.micro_batch_tokens = micro_batch_tokens
        self.chunk_tokens = chunk_tokens

    def optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
        """AdamW; biases and norms (one-dimensional parameters) do not decay."""
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        first, second = self.betas
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=self.learning_rate, betas=(first, second))

    def schedule(self, optimizer: torch.optim.Optimizer, total_steps: float) -> LambdaLR:
        """The learning-rate schedule, stepped once an optimizer step; `total_steps` may be infinite."""

        def factor(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / self.warmup_steps
            if self.lr_schedule == "constant" or math.isinf(total_steps):
                return 1.0
            done = min(1.0, (step - self.warmup_steps) / max(1.0, total_steps - self.warmup_steps))
            left = 1 - done if self.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
            return self.min_lr_ratio + (1 - self.min_lr_ratio) * left

        return LambdaLR(optimizer, factor)


def step_batch(samples: Sequence[Sample], algorithm: Algorithm) -> Batch:
    """All samples of a step with their advantages, [B, T], in the host's memory."""
    width = max(map(len, samples))
    shape = (len(samples), width)
    mask, logprobs = np.zeros(shape, np.bool_), np.zeros(shape)
    for i, sample in enumerate(samples):
        mask[i, : len(sample)] = sample.loss_mask
        logprobs[i, : len(sample)] = sample.completion.logprobs
    number: dict[str, int] = {}
    groups = [number.setdefault(sample.prompt.id, len(number)) for sample in samples]
    batch = Batch(
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        groups=torch.tensor(groups),
        mask=torch.from_numpy(mask),
        behaviour_logprobs=torch.from_numpy(logprobs),
    )
    return replace(batch, rewards=batch.rewards.float(), advantages=algorithm.advantages(batch))


def _on_device(batch: Batch, device: torch.device | str) -> Batch:
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None})


def total_tokens(sample: Sample) -> int:
    """Prompt and response."""
    return len(sample.prompt.token_ids) + len(sample)


def micro_batches(samples: Sequence[Sample], chosen: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Split `chosen` into lists of like length whose padded size stays within `max_tokens` (one sample always fits)."""
    width = {i: total_tokens(samples[i]) for i in chosen}
    current: list[int] = []
    for i in sorted(chosen, key=lambda i: (-width[i], i)):
        if current and (len(current) + 1) * width[current[0]] > max_tokens:
            yield current
            current = []
        current.append(i)
    if current:
        yield current


class Updater:
    """Runs the optimizer steps of one rollout step, on every rank the same ones.

    `backward`, `autocast` and `no_sync` are the trainer's own, so that its precision and its strategy hold; within
    `no_sync` a backward adds to this rank's gradients only.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        algorithm: Algorithm,
        settings: UpdateSettings,
        *,
        temperature: float,
        seed: int,
        backward: Callable[[Tensor], None],
        autocast: Callable[[], AbstractContextManager[Any]],
        no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
        reference: PreTrainedModel | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self.algorithm = algorithm
        self.settings = settings
        self.temperature = temperature
        self.seed = seed
        self.backward = backward
        self.autocast = autocast
        self.no_sync = no_sync
        self.reference = reference
        self.ranks = ranks or Alone()

    def run(self, samples: Sequence[Sample], step: int, *, optimizer: Any, schedule: LambdaLR) -> Mapping[str, float]:
        """All mini-batches of the step, in an order that follows from (seed, step); returns metrics.

        A meeting: every rank gives all samples of the step in the same order, and gets the same metrics.
        """
        batch = step_batch(samples, self.algorithm)
        order = np.random.default_rng([self.seed, step]).permutation(len(samples))
        dropout = int(np.random.default_rng([self.seed, step, 1]).integers(2**62))
        torch.manual_seed(dropout + self.ranks.rank)
        parts = np.array_split(order, min(self.settings.mini_batches, len(samples)))
        mine = [self._mini_batch(samples, batch, part.tolist(), optimizer, schedule) for part in parts]
        over_ranks = [_merged(each, mean=False) for each in zip(*self.ranks.gather(mine), strict=True)]
        return _merged(over_ranks, mean=True)

    def _mini_batch(
        self, samples: Sequence[Sample], batch: Batch, chosen: list[int], optimizer: Any, schedule: LambdaLR
    ) -> dict[str, float]:
        """This rank's part of the metrics."""
        num_tokens = max(1, int(batch.mask[chosen].sum()))
        dealt = deal([total_tokens(samples[i]) for i in chosen], self.ranks.size)
        mine = [chosen[i] for i in dealt[self.ranks.rank]]
        optimizer.zero_grad()
        metrics = self._backward(samples, batch, mine, num_tokens)
        self.ranks.sum_gradients([p for p in self.model.parameters() if p.requires_grad])
        of_all = self._step(optimizer, schedule)
        return {**metrics, **of_all} if self.ranks.rank == 0 else metrics

    def _backward(
        self, samples: Sequence[Sample], batch: Batch, chosen: list[int], num_tokens: int
    ) -> dict[str, float]:
        """Gradients of the samples of this rank; their metrics, none where there are no samples."""
        collected: list[Mapping[str, Tensor]] = []
        with self.no_sync():
            for part in micro_batches(samples, chosen, self.settings.micro_batch_tokens):
                self.ranks.check()
                loss, metrics = self._loss([samples[i] for i in part], batch, part, num_tokens)
                self.backward(loss)
                collected.append(metrics)
        return _merged([{name: float(m[name]) for name in m} for m in collected], mean=False)

    def _step(self, optimizer: Any, schedule: LambdaLR) -> dict[str, float]:
        """Move the weights by the gradient, which is the same on every rank."""
        grad_norm = self._clip()
        if not math.isfinite(grad_norm):
            raise RunError(
                f"the gradient is not finite ({grad_norm}): the weights are left as they were; go on from the last "
                "checkpoint with a smaller update.learning_rate"
            )
        learning_rate = float(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
        return {"grad_norm": grad_norm, "learning_rate": learning_rate}

    def _loss(
        self, samples: Sequence[Sample], batch: Batch, part: list[int], num_tokens: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        device = self.model.device
        tokens = token_batch(samples, device)
        mine = _on_device(batch.select(torch.tensor(part), tokens.response.shape[1]), device)
        chunk = self.settings.chunk_tokens
        with self.autocast():
            output = policy_output(self.model, tokens, temperature=self.temperature, chunk_tokens=chunk)
        mine = mine.cast(output.logprobs.dtype)
        if self.reference is not None:
            with torch.no_grad(), self.autocast():
                there = policy_output(self.reference, tokens, temperature=self.temperature, chunk_tokens=chunk)
            mine = mine.with_reference(there.logprobs)
        return self.algorithm.loss(mine, output, num_tokens)

    def _clip(self) -> float:
        """Clip the gradient's norm in place; returns the norm before."""
        limit = self.settings.max_grad_norm or math.inf
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))


def _merged(parts: Sequence[Mapping[str, float]], *, mean: bool) -> dict[str, float]:
    """One metric for each name that any part has, from the parts that have it."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _combine(name, [part[name] for part in parts if name in part], mean=mean) for name in names}


def _combine(name: str, values: Sequence[float], *, mean: bool) -> float:
    if name.endswith("/min"):
        return min(values)
    if name.endswith("/max"):
        return max(values)
    return sum(values) / (len(values) if mean else 1)
