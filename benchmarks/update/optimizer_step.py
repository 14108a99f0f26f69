"""An optimizer step over samples, to be measured again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rhymerl.algos import GRPO
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.updater import Updater
from rhymerl.types import Sample


def optimizer_step(
    model: Any, samples: Sequence[Sample], settings: UpdateSettings, optimizer: Any, **how: Any
) -> Callable[[], None]:
    """Return a step of GRPO at temperature 1; `how` are further arguments of its Updater."""
    schedule = settings.schedule(optimizer, float("inf"))
    updater = Updater(model, GRPO(), settings, temperature=1.0, backward=torch.Tensor.backward, **how)

    def step() -> None:
        updater.run(samples, 0, optimizer=optimizer, schedule=schedule)
        updater.forget()  # as a run does: no step begins with the gradients of the one before

    return step
