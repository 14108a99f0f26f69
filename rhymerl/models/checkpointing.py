"""Activation checkpointing of models, while they are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedModel


@contextmanager
def checkpointing(models: Sequence[PreTrainedModel]) -> Iterator[None]:
    """Activation checkpointing within; it works in training mode only."""
    for model in models:
        _either(model, "activation_checkpointing_enable", "gradient_checkpointing_enable")({"use_reentrant": False})
    try:
        yield
    finally:
        for model in models:
            _either(model, "activation_checkpointing_disable", "gradient_checkpointing_disable")()
            model.disable_input_require_grads()  # which transformers adds each time, and leaves there


def _either(model: PreTrainedModel, name: str, former: str) -> Callable[..., None]:
    """A method by the name that some versions of transformers call deprecated and others do not have yet."""
    method: Callable[..., None] = getattr(model, name, None) or getattr(model, former)
    return method
