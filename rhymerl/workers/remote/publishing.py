"""The way of weights to where workers load them: all of them each time, or, with adapters, the base once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import Tensor, nn

from rhymerl.models.lora import LowRank, is_adapted, unmerged
from rhymerl.models.sharding import GatheredTensors
from rhymerl.workers.messages import WeightSource

Put = Callable[[Iterable[tuple[str, Tensor]]], WeightSource]


def _merged(base: WeightSource, adapters: WeightSource, scaling: Mapping[str, float]) -> Mapping[str, Tensor]:
    """Add adapters to a base: `NAME.a` [rank, in] and `NAME.b` [out, rank] for each matrix NAME with a `scaling`."""
    tensors, parts = dict(base()), adapters()
    for name, scale in scaling.items():
        added = LowRank(a=parts[f"{name}.a"], b=parts[f"{name}.b"], scaling=scale)
        tensors[name] = added.added_to(tensors[name])
    return tensors


class Publisher:
    """Copies a model's weights by `put` to where workers load them."""

    def __init__(self, model: nn.Module, put: Put) -> None:
        self._model = model
        self._put = put
        self._base: WeightSource | None = None  # kept, so that late workers find it

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]]) -> WeightSource:
        """Publish `named_tensors`, with adapters merged; an unsharded model's adapters go apart from the base."""
        if not is_adapted(self._model) or isinstance(named_tensors, GatheredTensors):
            return self._put(named_tensors)
        base, adapters = unmerged(self._model)
        self._base = self._base or self._put(base.items())
        parts = {f"{name}.{kind}": part for name, each in adapters.items() for kind, part in each.parts().items()}
        scaling = {name: each.scaling for name, each in adapters.items()}
        return partial(_merged, self._base, self._put(parts.items()), scaling)
