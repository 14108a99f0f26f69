"""A policy from a checkpoint as a directory that plain `transformers` loads, written a file at a time."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rhymerl.models.lora import adapter_parameters, put_back, with_adapters
from rhymerl.models.policy import write_files
from rhymerl.models.wrapped import auto_class

FILE_BYTES = 2**32
_LAYER = re.compile(r".*?\.\d+\.")  # what the names of a layer's tensors begin with

Read = Callable[[Sequence[str]], Mapping[str, Tensor]]


def restore(
    files: Mapping[str, str],
    weights: Mapping[str, Tensor],
    directory: str | Path,
    *,
    read: Read,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write `Policy.files` and a state dict of the model as a directory that plain `transformers` loads.

    The weights' content is asked of `read` by their names, as many at a time as go into a file: about `file_bytes`, or
    a layer that is larger. Several files have an index. Raises ConfigError, before anything is written, for a file that
    would lie outside the directory.
    """
    directory = Path(directory)
    write_files(files, directory)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=dtype)
    put_back(model, directory)
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
    names = [name for name in model.state_dict() if name not in tied]
    of_adapters = {id(each) for each in adapter_parameters(model)}
    adapters = [name for name, each in model.named_parameters() if id(each) in of_adapters]
    model.load_state_dict({**weights, **(read(adapters) if adapters else {})}, assign=True)
    if (directory / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    parts = list(_parts({name: weights[name] for name in names if name not in adapters}, file_bytes))
    contents = (dict(with_adapters(model, read(part).items())) for part in parts)
    _write(model, contents, len(parts), directory)


def _parts(weights: Mapping[str, Tensor], file_bytes: int) -> Iterator[list[str]]:
    """Yield the names for each file, a layer's together: `transformers` may save them as other tensors."""
    part: list[str] = []
    held = 0
    for _, group in groupby(weights, key=_layer):
        names = list(group)
        size = sum(weights[name].nbytes for name in names)
        if part and held + size > file_bytes:
            yield part
            part, held = [], 0
        part, held = [*part, *names], held + size
    yield part


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return found.group() if found else name


def _write(model: PreTrainedModel, contents: Iterator[dict[str, Tensor]], count: int, directory: Path) -> None:
    """Write a file for each of `count` contents, and all but the weights."""
    places: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(contents, start=1):
        name = SAFE_WEIGHTS_NAME if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        total += sum(each.nbytes for each in tensors.values())
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            model.save_pretrained(folder, state_dict=tensors, max_shard_size=2**62)
            for path in Path(folder).iterdir():
                path.replace(directory / (name if path.name == SAFE_WEIGHTS_NAME else path.name))
        with safe_open(directory / name, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), name)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
