"""The tensors of a checkpoint in parts: each rank writes its own with torch.distributed.checkpoint, as safetensors.

They lie in a folder beside the checkpoint's file, which is written last: it names the folder and the checksum of each
part.
"""

from __future__ import annotations

import shutil
import warnings
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from rhymerl.errors import ConfigError, RunError

KEY = "shards"  # of a checkpoint whose tensors are in parts
_SUFFIX = ".shards"
_FILE_BYTES = 2**32  # of all ranks together; a rank holds its share of a file twice while it is written
_PART = "shard-"  # what the names of torch's files begin with; then comes the rank, from 1
_READ_BYTES = 2**24
_WEIGHTS, _STATES = "state_dict", "optimizer_states"

Checkpoint = dict[str, Any]


# -- tensors by name --------------------------------------------------------------------------------------------------


def split(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Return a checkpoint whose tensors of weights and optimizers have no content, and these by name.

    Tied ones have one name. Which are tied is seen by the objects, which are parameters: a rank may have nothing of
    either.
    """
    tensors = _tensors(checkpoint)
    shapes = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()}
    return _with(checkpoint, shapes), {name: each.detach() for name, each in tensors.items()}


def _tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors of weights and optimizers; what is one object has its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, each in checkpoint[_WEIGHTS].items():
        found.setdefault(id(each), (f"{_WEIGHTS}/{name}", each))
    for number, optimizer in enumerate(checkpoint.get(_STATES, [])):
        for index, values in optimizer["state"].items():
            found |= {id(each): (f"{_STATES}/{number}/{index}/{key}", each) for key, each in values.items()}
    return dict(found.values())


def _with(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> Checkpoint:
    """Return the checkpoint, no longer in parts, with these in the places of its `_tensors`."""
    others = {id(each): tensors[name] for name, each in _tensors(checkpoint).items()}
    parts = {name: checkpoint[name] for name in (_WEIGHTS, _STATES) if name in checkpoint}
    changed = tree_map(lambda each: others.get(id(each), each), parts)
    return {name: changed.get(name, value) for name, value in checkpoint.items() if name != KEY}


# -- writing ----------------------------------------------------------------------------------------------------------


def free_folder(path: Path) -> str:
    """Return the name of a new folder for the parts of the checkpoint at `path`, beside any earlier ones."""
    names = (f"{path.stem}.{number}{_SUFFIX}" for number in count())
    return next(name for name in names if not (path.parent / name).exists())


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
    totals = accumulate(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    numbers = [total // _FILE_BYTES for total in totals]
    present = {number: i for i, number in enumerate(sorted(set(numbers)), start=1)}
    return {name: present[number] for name, number in zip(tensors, numbers, strict=True)}


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


def read_whole(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return the checkpoint as one process would have written it."""
    wanted = {name: torch.empty_like(each, device="cpu") for name, each in _tensors(checkpoint).items()}
    _read(wanted, folder)
    return _with(checkpoint, wanted)


class StoredWeights:
    """Checkpoint weights in parts, named without `prefix`; open files, which may be removed before they are read."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, *, prefix: str) -> None:
        self._tensors = _tensors(checkpoint)
        stored = {id(each): name for name, each in self._tensors.items()}
        weights = checkpoint[_WEIGHTS].items()
        self._stored = {
            name.removeprefix(prefix): stored[id(each)] for name, each in weights if name.startswith(prefix)
        }
        places = HuggingFaceStorageReader(str(folder)).read_metadata().storage_data
        paths = {each.relative_path for each in places.values()}
        files = {path: safe_open(path, framework="pt") for path in paths}
        self._parts: dict[str, list[tuple[Sequence[int], Any]]] = {}
        for index, each in places.items():
            self._parts.setdefault(index.fqn, []).append((index.offset, files[each.relative_path]))

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return some of them, whole; of what is tied one tensor."""
        stored = {name: self._stored[name] for name in names}
        tensors = {each: self._whole(each) for each in dict.fromkeys(stored.values())}
        return {name: tensors[each] for name, each in stored.items()}

    def _whole(self, name: str) -> Tensor:
        tensor = torch.empty_like(self._tensors[name], device="cpu")
        for offset, file in self._parts[name]:
            part = file.get_tensor(name)
            tensor[tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))] = part
        return tensor


def take_parts(
    checkpoint: Checkpoint, folder: Path | None, weights: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
) -> Checkpoint:
    """Return the checkpoint with this rank's part of each tensor, sharded like `weights` and the optimizers'.

    The tensors are in the parts of a `folder`; None: in the checkpoint. Without optimizers none of theirs is read.
    """
    checkpoint = checkpoint if optimizers else {**checkpoint, _STATES: []}
    targets, tensors = _targets(checkpoint, weights, optimizers), _tensors(checkpoint)
    with torch.no_grad():
        parts = {
            name: torch.empty_like(targets[id(each)], dtype=each.dtype)
            if id(each) in targets
            else torch.empty_like(each, device="cpu")
            for name, each in tensors.items()
        }
        for name, part in parts.items() if folder is None else ():
            whole = tensors[name]
            if isinstance(part, DTensor):
                whole = distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)
            part.copy_(whole)
    if folder is not None:
        _read(parts, folder)
    return _with(checkpoint, parts)


def _targets(
    checkpoint: Checkpoint, weights: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
) -> dict[int, DTensor]:
    """Return what each tensor is sharded like, by its id; a step's number is the same on all ranks."""
    pairs = [(each, weights.get(name)) for name, each in checkpoint[_WEIGHTS].items()]
    for optimizer, saved in zip(optimizers, checkpoint.get(_STATES, []), strict=False):
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for index, values in saved["state"].items():
            pairs += [(each, parameters[index]) for key, each in values.items() if key != "step"]
    return {id(each): target for each, target in pairs if isinstance(target, DTensor)}


def _read(wanted: dict[str, Tensor], folder: Path) -> None:
    """Read tensors in place; each rank reads what it needs by itself, which torch would warn of."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
