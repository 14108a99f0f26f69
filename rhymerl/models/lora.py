"""Low-rank adapters: small matrices beside frozen ones are all that is trained.

LoRA (arXiv 2106.09685): a frozen matrix W acts as W + (alpha / rank) B A, where A [rank, in] starts at random and B
[out, rank] at 0.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rhymerl.errors import ConfigError, at_least, check_ranges, require, require_package
from rhymerl.models.sharding import replicated
from rhymerl.models.wrapped import language_modules

_NAME = "default"  # peft's own name for an only adapter
_CONFIG = "adapter_config.json"  # what peft writes
_BASE = ".base_layer."  # in the names of an adapted layer's own parameters


@dataclass(eq=False)
class LoRA:
    """Adapters on the linear layers whose names end with one of `targets`, such as q_proj.

    None: on all but the head. Experts are no layers. The output layers of Mamba mixers, whose weights fused kernels
    read themselves, and routers that choose the experts themselves (Llama 4, Phi-MoE) get none. In updates a share
    `dropout` of the adapters' inputs is left out.
    """

    rank: int = at_least(1, 16)
    alpha: float = 32.0
    _: KW_ONLY
    dropout: float = 0.0
    targets: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        require(0 < self.alpha < math.inf, "alpha", self.alpha, "more than 0, and finite")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "at least 0 and less than 1")
        some = "some of the model's linear layers, such as q_proj, or null for all"
        require(self.targets is None or bool(self.targets), "targets", [], some)

    def put_on(self, model: PreTrainedModel, *, seed: int) -> None:
        """Add adapters to the model in place and freeze the rest; its outputs do not change yet.

        Raises ConfigError when a target is no layer of the model, or peft is not installed.
        """
        config = _peft().LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self._found_in(model),
            exclude_modules=[*_of_towers(model), *(_more_than_linear(model) if self.targets else ())] or None,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            _inject(config, model)

    def _found_in(self, model: PreTrainedModel) -> list[str]:
        """Return names of layers. Peft's own "all-linear" is not used: it means parameters too that are no layers."""
        head = model.get_output_embeddings()
        is_tied = model.config.tie_word_embeddings
        spared = {*_of_towers(model), *_more_than_linear(model)}
        layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and not (is_tied and module is head) and name not in spared
        }
        others = [name for name, module in layers.items() if module is not head]
        if not (others if self.targets is None else layers):
            raise ConfigError(f"adapter: {type(model).__name__} has no linear layers of its own; expected null")
        if self.targets is None:
            return others
        given = f"adapter.targets={list(self.targets)}"
        known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        for target in self.targets:
            if not any(f".{name}".endswith(f".{target}") for name in layers):
                raise ConfigError(
                    f"{given}: {type(model).__name__} has no linear layer {target!r} of its own; expected some of {known}"
                )
        return list(self.targets)


def _of_towers(model: PreTrainedModel) -> list[str]:
    """Return the names of layers that text has nothing to do with."""
    of_text = set(map(id, language_modules(model)))
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) not in of_text
    ]


def _more_than_linear(model: PreTrainedModel) -> set[str]:
    """Return the names of the output layers of Mamba mixers, and of routers that choose the experts themselves."""
    named = list(model.named_modules())
    mixers = {f"{name}.out_proj" for name, module in named if hasattr(module, "A_log") and hasattr(module, "D")}
    return mixers | {name for name, module in named if isinstance(module, nn.Linear) and hasattr(module, "num_experts")}


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The matrix `scaling` b a, with a [rank, in] and b [out, rank], that an adapter adds to another one."""

    a: Tensor
    b: Tensor
    scaling: float

    def parts(self) -> dict[str, Tensor]:
        return {"a": self.a, "b": self.b}

    def added_to(self, weight: Tensor) -> Tensor:
        """Return the sum, [out, in], in the dtype of `weight`."""
        with torch.no_grad():
            return (weight + (self.b @ replicated(self.a)) * self.scaling).detach().to(weight.dtype)


def is_adapted(model: nn.Module) -> bool:
    """Return whether the model has adapters, of any origin."""
    return bool(_adapted(model))


def is_changed(model: nn.Module) -> bool:
    """Return whether its adapters, if it has any, do anything yet; those without content do not."""
    return any(bool(p.any()) for name, p in model.named_parameters() if ".lora_B." in name and not p.is_meta)


def check_adapters(model: nn.Module) -> None:
    """Raise ValueError for adapters of another kind, whose weights could be neither handed over nor exported."""
    if not is_adapted(model):
        return
    from peft.tuners.lora import Linear

    layers = _adapted(model).values()
    are_ours = all(isinstance(each, Linear) and list(each.scaling) == [_NAME] for each in layers)
    has_variants = any(getattr(each, "lora_variant", None) for each in layers)
    if not are_ours or has_variants or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "model: it has adapters that are not rhymerl's own; give it without them, and set adapter, or merge them into it first"
        )


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which the model computes as before its adaptation."""
    layers = _adapted(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def with_adapters(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors`, the model's parameters or state, with adapters merged into the weights.

    They come one after another, so that no second copy of the model is held.
    """
    layers = _adapted(model)
    of_adapters = {name for layer_name, layer in layers.items() for name in _own_names(layer_name, layer)}
    for name, tensor in tensors:
        layer_name, _, kind = name.rpartition(_BASE)
        if layer_name:
            whole = _low_rank(layers[layer_name]).added_to(tensor) if kind == "weight" else tensor.detach()
            yield f"{layer_name}.{kind}", whole
        elif name not in of_adapters:
            yield name, tensor


def unmerged(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, LowRank]]:
    """Return the parameters before adaptation, and the low-rank additions to some, both by a plain model's names."""
    layers = _adapted(model)
    of_adapters = {name for layer_name, layer in layers.items() for name in _own_names(layer_name, layer)}
    base: dict[str, Tensor] = {
        name.replace(_BASE, "."): parameter for name, parameter in model.named_parameters() if name not in of_adapters
    }
    return base, {f"{name}.weight": _low_rank(layer) for name, layer in layers.items()}


def _low_rank(layer: Any) -> LowRank:
    return LowRank(
        a=layer.lora_A[_NAME].weight.detach(), b=layer.lora_B[_NAME].weight.detach(), scaling=layer.scaling[_NAME]
    )


def save_config(model: nn.Module, folder: Path) -> None:
    """Write what `put_back` needs, if the model is adapted."""
    for config in getattr(model, "peft_config", {}).values():
        config.save_pretrained(folder)


def put_back(model: PreTrainedModel, folder: Path) -> None:
    """Adapt the model as the file says that `save_config` wrote, if there is one; and remove that."""
    if (folder / _CONFIG).exists():
        LoraConfig = _peft().LoraConfig  # noqa: N806 - a class
        _inject(LoraConfig.from_pretrained(str(folder)), model)
        (folder / _CONFIG).unlink()


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Keep the adapters in float32 or better when the model within is cast: small steps would be lost to rounding."""
    before = [(parameter, _in_full(parameter.data)) for parameter in adapter_parameters(model)]
    yield
    for parameter, data in before:
        if parameter.dtype.itemsize < 4:
            parameter.data = data.to(parameter.device)


def _inject(config: Any, model: PreTrainedModel) -> None:
    with _of_no_family(model):
        _peft().inject_adapter_in_model(config, model, adapter_name=_NAME)
    config.target_modules = sorted(config.target_modules)  # sets, which would be saved in any order
    if config.exclude_modules:
        config.exclude_modules = sorted(config.exclude_modules)
    for parameter in adapter_parameters(model):
        parameter.data = _in_full(parameter.data)


@contextmanager
def _of_no_family(model: PreTrainedModel) -> Iterator[None]:
    """Context in which peft does not know the model's family.

    Else it takes dense layers of a model with experts for the experts that had their names in transformers 4.
    """
    config: Any = model.config
    config.model_type = ""
    try:
        yield
    finally:
        del config.model_type  # the class has it


def _in_full(data: Tensor) -> Tensor:
    return data.to(torch.promote_types(data.dtype, torch.float32))


def _peft() -> Any:
    require_package("peft", "adapter")
    import peft

    return peft


def _adapted(model: nn.Module) -> dict[str, Any]:
    """Adapted layers by name; peft is not imported for a model that has none."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, peft.BaseTunerLayer)}


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the model's adapters, none where it has none."""
    parts = [getattr(layer, part) for layer in _adapted(model).values() for part in layer.adapter_layer_names]
    return [parameter for part in parts for parameter in part.parameters()]


def _own_names(layer_name: str, layer: Any) -> Iterator[str]:
    for part in layer.adapter_layer_names:
        for name in getattr(layer, part).state_dict():
            yield f"{layer_name}.{part}.{name}"
