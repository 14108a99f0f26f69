"""Low-rank adapters: small matrices beside frozen ones are all that is trained.

LoRA (arXiv 2106.09685): a frozen matrix W acts as W + (alpha / rank) B A, where A [rank, in] starts at random and B [out, rank] at 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rhymerl.errors import ConfigError, require_at_least

_CONFIG = "adapter_config.json"  # what peft writes
_BASE = ".base_layer."  # in the names of an adapted layer's own parameters


class LoRA:
    """Adapters on the linear layers whose names end with one of `targets`, such as q_proj; None: on all but the head.

    In updates a share `dropout` of the adapters' inputs is left out.
    """

    def __init__(
        self, rank: int = 16, alpha: float = 32.0, *, dropout: float = 0.0, targets: Sequence[str] | None = None
    ) -> None:
        require_at_least("adapter", {"rank": (rank, 1)})
        if alpha <= 0:
            raise ConfigError(f"adapter.alpha={alpha}: expected more than 0")
        if not 0 <= dropout < 1:
            raise ConfigError(f"adapter.dropout={dropout}: expected at least 0 and less than 1")
        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.targets = targets

    def put_on(self, model: PreTrainedModel, *, seed: int) -> None:
        """Adapt the model in place, which does not change yet what it computes; all but the adapters is frozen.

        Raises ConfigError when a target is no layer of the model, or peft is not installed.
        """
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise ConfigError("adapter: this needs peft: pip install 'rhymerl[lora]'") from error
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            target_modules=self._found_in(model),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            _inject(config, model)

    def _found_in(self, model: PreTrainedModel) -> list[str] | str:
        """The targets, as peft wants them."""
        if self.targets is None:
            return "all-linear"
        given = f"adapter.targets={list(self.targets)}"
        head = model.get_output_embeddings()
        is_tied = model.config.get_text_config().tie_word_embeddings
        layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and not (is_tied and module is head)
        }
        known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        if not self.targets:
            raise ConfigError(f"{given}: expected some of {known}, or null for all")
        for target in self.targets:
            if not any(f".{name}".endswith(f".{target}") for name in layers):
                raise ConfigError(
                    f"{given}: {type(model).__name__} has no linear layer {target!r} of its own; expected some of {known}"
                )
        return list(self.targets)


def is_adapted(model: nn.Module) -> bool:
    """Whether the model has adapters, ours or others that peft has put there."""
    return bool(_adapted(model))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within, the model is what it was before it was adapted."""
    layers = _adapted(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Of `tensors`, parameters or state of the model, those of one without adapters that computes the same.

    They come one after another, so that no second copy of the model is held.
    """
    layers = _adapted(model)
    of_adapters = {name for layer_name, layer in layers.items() for name in _own_names(layer_name, layer)}
    for name, tensor in tensors:
        layer_name, _, kind = name.rpartition(_BASE)
        if layer_name:
            layer = layers[layer_name]
            changes = [layer.get_delta_weight(each) for each in layer.active_adapters if kind == "weight"]
            yield f"{layer_name}.{kind}", sum(changes, tensor).to(tensor.dtype)
        elif name not in of_adapters:
            yield name, tensor


def save_config(model: nn.Module, folder: Path) -> None:
    """Write what `put_back` needs, if the model is adapted."""
    for config in getattr(model, "peft_config", {}).values():
        config.save_pretrained(folder)


def put_back(model: PreTrainedModel, folder: Path) -> None:
    """Adapt the model as the file says that `save_config` wrote, if there is one; and remove that."""
    if (folder / _CONFIG).exists():
        from peft import LoraConfig

        _inject(LoraConfig.from_pretrained(str(folder)), model)
        (folder / _CONFIG).unlink()


def in_full(model: nn.Module) -> None:
    """Adapters are in float32 or better, whatever the rest is in: small steps would be lost to rounding."""
    for layer in _adapted(model).values():
        of_adapters = set(_own_names("", layer))
        for own_name, parameter in layer.named_parameters():
            if f".{own_name}" in of_adapters and parameter.dtype.itemsize < 4:
                parameter.data = parameter.data.float()


def _inject(config: Any, model: PreTrainedModel) -> None:
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, model)
    config.target_modules = sorted(config.target_modules)  # a set, which would be saved in any order
    in_full(model)


def _adapted(model: nn.Module) -> dict[str, Any]:
    """Adapted layers by name; peft is not imported for a model that has none."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, peft.BaseTunerLayer)}


def _own_names(layer_name: str, layer: Any) -> Iterator[str]:
    """Of the adapters' tensors in a layer."""
    for part in layer.adapter_layer_names:
        for name in getattr(layer, part).state_dict():
            yield f"{layer_name}.{part}.{name}"
