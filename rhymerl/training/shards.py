"""The tensors of a checkpoint in parts: each rank writes its own with torch.distributed.checkpoint, as safetensors.

They lie in a folder beside the checkpoint's file, which is written last: it names the folder and the checksum of each
part.
"""

from __future__ import annotations

import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from rhymerl.errors import ConfigError, RunError

KEY = "shards"  # of a checkpoint whose tensors are in parts
_SUFFIX = ".shards"
_FILE_BYTES = 2**32  # of all ranks together; a rank holds its share of a file twice while it is written
_PART = "shard-"  # what the names of torch's files begin with; then comes the rank, from 1
_READ_BYTES = 2**24
_WEIGHTS, _STATES = "state_dict", "optimizer_states"
_NAMES = "weight_names"  # each with the one of them under which its tensor is

Checkpoint = dict[str, Any]


# -- names of tensors -------------------------------------------------------------------------------------------------


def split(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Return a checkpoint without weights' and optimizers' tensors, and these by name; tied ones have one name.

    Which are tied is seen by the objects, which are parameters: a rank may have nothing of either.
    """
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in checkpoint[_WEIGHTS].items()}
    tensors = {f"{_WEIGHTS}/{name}": checkpoint[_WEIGHTS][name].detach() for name in dict.fromkeys(names.values())}
    for number, optimizer in enumerate(checkpoint.get(_STATES, [])):
        for index, values in optimizer["state"].items():
            tensors |= {f"{_STATES}/{number}/{index}/{key}": value for key, value in values.items()}
    states = [{**optimizer, "state": {}} for optimizer in checkpoint.get(_STATES, [])]
    rest = {name: value for name, value in checkpoint.items() if name != _WEIGHTS}
    return {**rest, _NAMES: names, **({_STATES: states} if _STATES in checkpoint else {})}, tensors


def _join(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> Checkpoint:
    """Undo `split`."""
    states = [{**optimizer, "state": {}} for optimizer in checkpoint.get(_STATES, [])]
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == _WEIGHTS:
            weights[rest] = tensor
        else:
            number, index, key = rest.split("/")
            states[int(number)]["state"].setdefault(int(index), {})[key] = tensor
    named = {name: weights[one] for name, one in checkpoint[_NAMES].items() if one in weights}
    others = {name: value for name, value in checkpoint.items() if name not in (KEY, _NAMES)}
    return {**others, _WEIGHTS: named, **({_STATES: states} if states else {})}


# -- writing ----------------------------------------------------------------------------------------------------------


def free_folder(path: Path) -> str:
    """Return the name of a new folder for the parts of the checkpoint at `path`, beside any earlier ones."""
    number = 0
    while (path.parent / f"{path.stem}.{number}{_SUFFIX}").exists():
        number += 1
    return f"{path.stem}.{number}{_SUFFIX}"


def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write this rank's parts, a collective; they are on the disk afterwards. Raises RunError where a rank cannot."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_files(tensors), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise RunError(
            f"{folder}: cannot be written by rank {rank}: {reason}; what was saved before is whole"
        ) from error


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of the file, from 1, for each tensor."""
    numbers: dict[str, int] = {}
    total = 0
    for name, tensor in tensors.items():
        total += tensor.numel() * tensor.itemsize
        numbers[name] = 1 + total // _FILE_BYTES
    present = {number: i for i, number in enumerate(sorted(set(numbers.values())), start=1)}
    return {name: present[number] for name, number in numbers.items()}


def checksums(folder: Path, rank: int) -> dict[str, list[int]]:
    """Return size and CRC-32 of this rank's files; other ranks' may be visible later in a shared folder."""
    mine = f"{_PART}{rank + 1:05d}-"
    return {
        path.name: _checksum(path)
        for path in sorted(folder.iterdir())
        if path.name.startswith(mine) or (rank == 0 and not path.name.startswith(_PART))
    }


def _checksum(path: Path) -> list[int]:
    checksum, num_bytes = 0, 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            checksum, num_bytes = zlib.crc32(part, checksum), num_bytes + len(part)
    return [num_bytes, checksum]


def remove_orphans(directory: Path) -> None:
    """Remove parts of checkpoints that were never finished, or are gone."""
    for folder in directory.glob(f"*{_SUFFIX}"):
        if not (directory / f"{_stem(folder)}.ckpt").exists():
            shutil.rmtree(folder)


def remove_others(path: Path, kept: str | None = None) -> None:
    """Remove the parts that the checkpoint at `path` has had, but for the folder that is `kept`."""
    for folder in path.parent.glob(f"*{_SUFFIX}"):
        if _stem(folder) == path.stem and folder.name != kept:
            shutil.rmtree(folder)


def _stem(folder: Path) -> str:
    return folder.name.removesuffix(_SUFFIX).rpartition(".")[0]


# -- reading ----------------------------------------------------------------------------------------------------------


def has_shards(directory: Path) -> bool:
    """Return whether any checkpoint of a directory is in parts."""
    return any(directory.glob(f"*{_SUFFIX}"))


def folder_of(checkpoint: Checkpoint, path: Path, where: str) -> Path:
    """Return the folder of the parts. Raises ConfigError where it is not beside the file."""
    name = str(checkpoint[KEY]["folder"])
    folder = path.resolve().parent / name
    if Path(name).name != name or not folder.is_dir():
        raise ConfigError(
            f"{where}: its tensors are in the folder {name!r}, which is not beside it; keep both together"
        )
    return folder


def damage_of(checkpoint: Checkpoint, path: Path) -> str | None:
    """Return what is wrong with the parts, None when they are whole."""
    folder = path.resolve().parent / Path(checkpoint[KEY]["folder"]).name
    for name, expected in checkpoint[KEY]["files"].items():
        part = folder / Path(name).name
        if not part.is_file():
            return f"{folder.name}/{name} is not there"
        if _checksum(part) != list(expected):
            return f"the checksum of {folder.name}/{name} differs"
    return None


def described(folder: Path) -> dict[str, Tensor]:
    """Return all tensors by name, without their content."""
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
        for name, each in found.items()
        if isinstance(each, TensorStorageMetadata)
    }


def weights_described(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return the checkpoint with its weights' names and shapes."""
    return _join(checkpoint, {name: each for name, each in described(folder).items() if name.startswith(_WEIGHTS)})


def read_whole(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return the checkpoint as one process would have written it."""
    wanted = {name: torch.empty_like(each, device="cpu") for name, each in described(folder).items()}
    _read(wanted, folder)
    return _join(checkpoint, wanted)


class StoredWeights:
    """Checkpoint weights in parts, named without `prefix`; open files, which may be removed before they are read."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, *, prefix: str) -> None:
        found = HuggingFaceStorageReader(str(folder)).read_metadata()
        self._stored = {
            name.removeprefix(prefix): f"{_WEIGHTS}/{one}"
            for name, one in checkpoint[_NAMES].items()
            if name.startswith(prefix)
        }
        self._described = found.state_dict_metadata
        paths = {each.relative_path for each in found.storage_data.values()}
        files = {path: safe_open(path, framework="pt") for path in paths}
        self._parts: dict[str, list[tuple[Sequence[int], Any]]] = {}
        for index, each in found.storage_data.items():
            self._parts.setdefault(index.fqn, []).append((index.offset, files[each.relative_path]))

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return some of them, whole; of what is tied one tensor."""
        stored = {name: self._stored[name] for name in names}
        tensors = {each: self._whole(each) for each in dict.fromkeys(stored.values())}
        return {name: tensors[each] for name, each in stored.items()}

    def _whole(self, name: str) -> Tensor:
        described = self._described[name]
        assert isinstance(described, TensorStorageMetadata)
        tensor = torch.empty(described.size, dtype=described.properties.dtype)
        for offset, file in self._parts[name]:
            part = file.get_tensor(name)
            tensor[tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))] = part
        return tensor


def read_parts(
    checkpoint: Checkpoint, folder: Path, weights: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
) -> Checkpoint:
    """Return the checkpoint with this rank's part of each tensor, sharded like `weights` and the optimizers'."""
    targets = dict(_targets(described(folder), weights, optimizers))
    wanted = {
        name: torch.empty_like(target, dtype=each.dtype)
        if isinstance(target, DTensor)
        else torch.empty_like(each, device="cpu")
        for name, (each, target) in targets.items()
    }
    _read(wanted, folder)
    return _join(checkpoint, wanted)


def take_parts(checkpoint: Checkpoint, weights: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> Checkpoint:
    """Return a checkpoint of whole tensors as `read_parts` returns one in parts."""
    rest, tensors = split(checkpoint)
    parts = {
        name: _part(each, target) if isinstance(target, DTensor) else each
        for name, (each, target) in _targets(tensors, weights, optimizers)
    }
    return _join(rest, parts)


def _targets(
    tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, tuple[Tensor, Tensor | None]]]:
    """Yield each tensor with the one whose sharding it gets; a step's number is the same on all ranks."""
    parameters: list[list[nn.Parameter]] = [
        [each for group in optimizer.param_groups for each in group["params"]] for optimizer in optimizers
    ]
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == _WEIGHTS:
            yield name, (tensor, weights.get(rest))
        elif parameters:
            number, index, key = rest.split("/")
            yield name, (tensor, None if key == "step" else parameters[int(number)][int(index)])


def _part(tensor: Tensor, target: DTensor) -> Tensor:
    part = torch.empty_like(target, dtype=tensor.dtype)
    part.copy_(distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None))
    return part


def _read(wanted: dict[str, Tensor], folder: Path) -> None:
    """Read tensors in place; each rank reads what it needs by itself, which torch would warn of."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
