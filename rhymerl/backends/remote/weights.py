"""Ways for the policy's weights into an engine. All of them check what the engine answers."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rhymerl.backends.remote.client import Client, RefusedError, UnknownPathError
from rhymerl.errors import BackendError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BUCKET_BYTES = 2**28  # each of several servers has one on the way
_SHARED_MEMORY = Path("/dev/shm")
_SETTLE_S = 10.0
_SPARE = 64  # tokens
_BY_LENGTH = ("dynamic", "longrope")  # rotations that are scaled by the context's length
_SHARED_NAME = "shared"  # beside the file that several engines load; they read *.safetensors
_ROOM = 1.2  # times what is written that has to be free in shared memory


def from_tensors(
    engine: Client,
    named: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    *,
    device: torch.device,
    ranks: int,
    version: int,
) -> None:
    """Hand over copies in memory of `device`, which the engine shares, a bucket at a time."""
    with update_session(engine):
        for bucket in buckets(named, dtype):
            # What has been shared once stays so, and the policy's own memory is not to.
            copies = [(name, tensor.to(device, copy=True)) for name, tensor in bucket]
            handles = [base64.b64encode(_pickled(copies)).decode() for _ in range(ranks)]  # each is good for one use
            content = {"serialized_named_tensors": handles, "weight_version": str(version), "flush_cache": False}
            engine.post("/update_weights_from_tensor", content)


def from_disk(
    engine: Client,
    named: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    folder: Path,
    *,
    version: int,
    shared: SharedWeightFile | None = None,
) -> None:
    """Send the weights through a checkpoint in `folder`, which has the model's config; they are removed afterwards.

    The file may be `shared` with other engines that load this version in this dtype.
    """
    file = folder / "model.safetensors"

    def write(path: Path) -> None:
        tensors = {name: _ready(tensor, dtype).cpu().contiguous() for name, tensor in named}
        save_file(tensors, path, metadata={"format": "pt"})

    try:
        shared.put(file, version, write) if shared is not None else write(file)
    except (OSError, SafetensorError) as error:
        raise BackendError(f"backend.folder: weights cannot be written to {folder} ({error})") from error
    try:
        content = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "weight_version": str(version),
            "flush_cache": False,
        }
        engine.post("/update_weights_from_disk", content)
    except RefusedError as error:
        raise RefusedError(f"{error}; does it see {folder}? That is below backend.folder") from error
    finally:
        file.unlink()


class SharedWeightFile:
    """The newest weights: the first of `num_engines` engines writes them, and the others link to that file.

    Any thread may call it. The file is kept until all engines have had it, or there are newer weights.
    """

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._lock = threading.Lock()
        self._version = -1
        self._path: Path | None = None
        self._num_left = 0  # engines that have not had it

    def put(self, file: Path, version: int, write: Callable[[Path], None]) -> None:
        """Make `file`: a link to that of this version, or by `write`, whose errors it raises; the caller removes it."""
        with self._lock:
            if self._link(file, version):
                return
            write(file)
            if version > self._version:
                self._keep(file, version)

    def _link(self, file: Path, version: int) -> bool:
        if version != self._version or self._path is None:
            return False
        try:
            os.link(self._path, file)
        except OSError:  # it lies on another disk, or its folder is gone
            return False
        self._num_left -= 1
        if not self._num_left:
            self._drop()
        return True

    def _keep(self, file: Path, version: int) -> None:
        self._drop()
        self._version, self._num_left = version, self._num_engines - 1
        if self._num_left:
            kept = file.with_name(_SHARED_NAME)
            with suppress(OSError):  # where a disk knows no links each engine has a file of its own
                os.link(file, kept)
                self._path = kept

    def _drop(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._path = None


def flush(engine: Client) -> None:
    """Forget keys and values of older weights. Nothing may be in flight; a last pass may still be under way."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        try:
            engine.post("/flush_cache", {})
        except RefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def buckets(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors in the engine's dtype (None: in their own), about a quarter of a gigabyte at a time."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        ready = _ready(tensor, dtype)
        if bucket and size + ready.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, ready))
        size += ready.nbytes
    if bucket:
        yield bucket


def write_config(model: PreTrainedModel, folder: Path) -> None:
    """Write what an engine needs to build the model, without stop tokens, which come with each request.

    SGLang would end an answer at the config's own as well, whatever the request says.
    """
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    content: dict[str, Any] = json.loads(path.read_text())
    own = {"architectures": [type(model).__name__], "eos_token_id": None, "max_position_embeddings": positions(model)}
    path.write_text(json.dumps({**content, **own}, indent=1))


def positions(model: PreTrainedModel, longest_tokens: int | None = None) -> int:
    """Return the longest sequence to tell an engine.

    SGLang keeps some positions for itself, and drafts stand behind the last token. Its buffers grow with that, so it is
    no more than the `longest_tokens` that will come (None: the model's context). Where the rotation of keys follows
    that number it stays as it is, and the longest sequences are an error there.
    """
    config = model.config.get_text_config()
    context = int(getattr(config, "max_position_embeddings", 0) or 2**20)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", "default") in _BY_LENGTH:
        return context
    return min(context, longest_tokens or context) + _SPARE


def make_folder(folder: Path, model: PreTrainedModel, *, copies: int = 1, in_memory: bool = True) -> Path:
    """Make a folder for weights that only this user can read.

    With `in_memory` it is in shared memory if there is room for as many copies, else it is in `folder`. Everybody may
    make folders in shared memory, so this one has a name that nobody knows before it is there.
    """
    needed = copies * _ROOM * sum(parameter.nbytes for parameter in model.parameters())
    if in_memory and _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > needed:
        return Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=_SHARED_MEMORY))
    (folder / "weights").mkdir(mode=0o700)
    return folder / "weights"


def _ready(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to(dtype or tensor.dtype)


def _pickled(bucket: list[tuple[str, Tensor]]) -> bytes:
    """Handles of the tensors' memory; they have to live until the engine has answered.

    Memory of the CPU goes by a file's name: an open file could only be handed to a process of our own family.
    """
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(bucket)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return buffer.getvalue()


@contextmanager
def update_session(engine: Client) -> Iterator[None]:
    """Newer engines want to know where an update begins and ends; older ones do not know the words."""
    has_sessions = True
    try:
        engine.post("/begin_weight_update", {})
    except UnknownPathError:
        has_sessions = False
    except RefusedError:  # a failed or killed trainer has left one open
        engine.post("/end_weight_update", {})
        engine.post("/begin_weight_update", {})
    yield  # what an error leaves open is ended by the next one
    if has_sessions:
        engine.post("/end_weight_update", {})
