"""Weights that come when a model is sharded: until then it has shapes only, and no rank ever holds all of them.

A model of safetensors files in its own names is read one tensor at a time by each rank. Any other one, such as one that
is made at random, is whole on rank 0, which sends each tensor to the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils import swap_tensors
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from rhymerl.models.fingerprint import fingerprint_of, summary

_BASE = ".base_layer."  # in the names of what an adapter adapts


class DeferredWeights(ABC):
    """The tensors of a model that has none yet, by name."""

    @abstractmethod
    def read(self, name: str, like: Tensor, device: torch.device) -> Tensor:
        """Return a tensor with the shape and dtype of `like`, or `like` itself where there is none of that name.

        Called on all ranks in one order, each for its device.
        """

    def close(self) -> None:
        """Free what is held; it may be read again."""


class TensorFiles(DeferredWeights):
    """Tensors in safetensors files, which every rank reads."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files  # by the names of tensors

    def read(self, name: str, like: Tensor, device: torch.device) -> Tensor:
        if name not in self._files and not like.is_meta:
            return like
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.to(like.dtype)

    def fit(self, model: PreTrainedModel) -> bool:
        """Return whether they are all of a model's parameters, as they are, each once."""
        wanted = {name: tuple(each.shape) for name, each in model.named_parameters()}
        again = {name for name, _ in model.named_parameters(remove_duplicate=False)} - wanted.keys()
        if not wanted.keys() <= self._files.keys() or again & self._files.keys():
            return False
        return all(shape == self._shape(name) for name, shape in wanted.items())

    def _shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self._files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())


class FirstRankWeights(DeferredWeights):
    """Tensors that rank 0 alone has, for as long as they are read, by `load`."""

    def __init__(self, load: Callable[[], nn.Module]) -> None:
        self._load = load
        self._tensors: dict[str, Tensor] | None = None

    def read(self, name: str, like: Tensor, device: torch.device) -> Tensor:
        if dist.get_rank() == 0:
            if self._tensors is None:
                self._tensors = self._load().state_dict()
            tensor = self._tensors[name].to(device, like.dtype).contiguous()
        else:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
        dist.broadcast(tensor, 0)
        return tensor

    def close(self) -> None:
        self._tensors = None


def files_of(name: str, model: PreTrainedModel, *, is_here: bool) -> TensorFiles | None:
    """Return the files of a directory or hub's model, local if it `is_here`; None if they are not `model`'s tensors."""
    in_float32 = (getattr(model, f"_keep_in_fp32_modules{end}", None) for end in ("", "_strict"))
    if getattr(model.config, "quantization_config", None) or any(in_float32):
        return None
    found = TensorFiles(names_in(name, is_here=is_here))
    return found if found.fit(model) else None


def names_in(name: str, *, is_here: bool) -> dict[str, Path]:
    """Return the files of a directory or a hub's model by tensor name; empty if none are safetensors."""
    where: dict[str, Any] = {"local_files_only": is_here, "_raise_exceptions_for_missing_entries": False}
    if index := cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **where):
        paths, _ = get_checkpoint_shard_files(name, index, local_files_only=is_here)
    elif path := cached_file(name, SAFE_WEIGHTS_NAME, **where):
        paths = [path]
    else:
        paths = []
    files: dict[str, Path] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), Path(path))
    return files


def generation_config_of(name: str, *, is_here: bool) -> GenerationConfig | None:
    """Return what is beside a model's files, if there is one."""
    where: dict[str, Any] = {"local_files_only": is_here}
    found = cached_file(name, GENERATION_CONFIG_NAME, **where, _raise_exceptions_for_missing_entries=False)
    return GenerationConfig.from_pretrained(name, **where) if found else None


# -- models without content
# ---------------------------------------------------------------------------------------------


@contextmanager
def without_content() -> Iterator[None]:
    """Context in which parameters of new modules go to the meta device once they are made; buffers do not."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is shared has been here before
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def on_cpu(model: nn.Module) -> Iterator[None]:
    """Context in which parameters without content appear to be on the CPU, where their adapters are then made."""
    held = [parameter for parameter in model.parameters() if parameter.is_meta]
    for parameter in held:
        _give(parameter, torch.empty((), dtype=parameter.dtype).expand(parameter.shape))
    try:
        yield
    finally:
        for parameter in held:
            _give(parameter, _shape_of(parameter))


def _give(parameter: nn.Parameter, content: Tensor) -> None:
    """Replace a parameter's content by one that may be on another device; it stays the same object."""
    swap_tensors(parameter, nn.Parameter(content, requires_grad=parameter.requires_grad))


class Filler:
    """Gives a model that is being sharded its content, one module after another."""

    def __init__(self, model: nn.Module, weights: DeferredWeights, device: torch.device, *, prefix: str = "") -> None:
        """`prefix` is what the names of a part of a model begin with in `weights`. A collective, as `__call__`.

        The model may be cast afterwards: its fingerprint is that of the weights as they would have been loaded.
        """
        self._weights = weights
        self._device = device
        self._wanted = {
            id(each): (prefix + _plain(name), _shape_of(each))
            for name, each in model.named_parameters()
            if each.is_meta
        }
        self._summaries: dict[int, bytes] = {}
        self._state: list[tuple[str, Tensor, int]] = []  # names, shapes, and which summary: the tensors themselves go
        for name, each in model.state_dict(keep_vars=True).items():
            if not isinstance(each, nn.Parameter):
                each.copy_(weights.read(prefix + _plain(name), each, device))
            if not each.is_meta:
                self._summaries[id(each)] = summary(each)
            self._state.append((name, _shape_of(each), id(each)))

    def __call__(self, module: nn.Module) -> None:
        """Give the parameters of a module their content, where they have none."""
        for parameter in module.parameters():
            if parameter.is_meta:
                content = self._weights.read(*self._wanted[id(parameter)], self._device)
                self._summaries[id(parameter)] = summary(content)
                _give(parameter, content.to(parameter.dtype))

    def fingerprint(self) -> str:
        """Return the fingerprint of the model, once all of its modules have been filled."""
        return fingerprint_of((name, shape, self._summaries[key]) for name, shape, key in self._state)


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _plain(name: str) -> str:
    return name.replace(_BASE, ".")
