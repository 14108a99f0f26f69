"""GGUF: a model, tokenizer and chat template in one file, perhaps quantised; transformers reads it."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from rhymerl.errors import ConfigError
from rhymerl.models.loading import read_model
from rhymerl.models.places import check_gguf

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_END = "tokenizer.ggml.eos_token_id"
_ENDS_OF_TURNS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")  # which transformers does not read
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    """What a file says of itself: `metadata` has an array's length in its place."""

    metadata: dict[str, Any]
    tensors: frozenset[str]

    @property
    def scaled_rope(self) -> str | None:
        """What says that rotary positions are scaled; None where nothing does."""
        key = f"{self.metadata.get('general.architecture')}.rope.scaling.type"
        if self.metadata.get(key, "none") != "none":
            return f"{key}={self.metadata[key]}"
        return next((name for name in _ROPE_TENSORS if name in self.tensors), None)

    @property
    def ends(self) -> list[int]:
        return sorted({self.metadata[name] for name in (_END, *_ENDS_OF_TURNS) if name in self.metadata})


def read_header(path: Path, where: str) -> GGUFHeader:
    """Read the header, and check that all tensors lie in the file.

    Errors begin with `where`. Raises ConfigError for a file that is not there, is broken or has no tokenizer, and
    without the package that it needs, or where transformers would make up what the file does not say.
    """
    check_gguf(path, where)
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ConfigError(f"{where}: not a GGUF file (it does not begin with 'GGUF')")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                header = _Reader(content).header()
    except (OSError, OverflowError, LookupError, ValueError, struct.error) as error:
        raise ConfigError(f"{where}: broken or truncated: {error}") from error
    if not header.metadata.get("tokenizer.ggml.tokens"):
        raise ConfigError(f"{where}: it has no tokenizer (tokenizer.ggml.tokens); it needs that of the model")
    # What transformers would make up: that the token 2 ends an answer, and a context of 2048 tokens.
    for name in (_END, f"{header.metadata.get('general.architecture')}.context_length"):
        if name not in header.metadata:
            raise ConfigError(f"{where}: it does not say {name}, which the model needs")
    return header


def load_model(place: Mapping[str, Any], dtype: torch.dtype, *, header: GGUFHeader, where: str) -> PreTrainedModel:
    """Read the model, its weights dequantised.

    Raises ConfigError where transformers would make up weights that are missing, or leave positions unscaled.
    """
    quantized = GgufConfig(dequantize=True)
    model = read_model(AutoModelForCausalLM, where, **place, dtype=dtype, quantization_config=quantized)
    rope = getattr(model.config, "rope_parameters", None) or {}
    if header.scaled_rope is not None and rope.get("rope_type", "default") == "default":
        raise ConfigError(
            f"{where}: its rope is scaled ({header.scaled_rope}), which transformers does not read from GGUF; "
            "use the directory that the file was made from"
        )
    if len(header.ends) > 1:
        model.generation_config.eos_token_id = header.ends
    return model


@contextmanager
def alone(path: Path) -> Iterator[dict[str, Any]]:
    """Where transformers finds the file in a directory without others, which it would read too."""
    with TemporaryDirectory() as folder:
        Path(folder, path.name).symlink_to(path.resolve())
        yield {"pretrained_model_name_or_path": folder, "gguf_file": path.name, "local_files_only": True}


class _Reader:
    """Reads a header from its start. Raises ValueError or struct.error where it cannot go on."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.place = len(_MAGIC)

    def header(self) -> GGUFHeader:
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"it says that it has version {version} of the format, expected 2 or 3")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata = {self._string(): self._value(self._number("I")) for _ in range(num_values)}
        tensors = [(self._string(), self._num_bytes(), self._number("Q")) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment={alignment!r}")
        start = math.ceil(self.place / alignment) * alignment
        for name, num_bytes, offset in tensors:
            if start + offset + num_bytes > len(self.content):
                raise ValueError(
                    f"{name} ends at byte {start + offset + num_bytes:,}, but the file has {len(self.content):,}"
                )
        return GGUFHeader(metadata=metadata, tensors=frozenset(name for name, *_ in tensors))

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.content, self.place)
        self.place += struct.calcsize(f"<{form}")
        return value

    def _skip(self, num_bytes: int) -> None:
        if self.place + num_bytes > len(self.content):
            raise ValueError(f"its header says more than its {len(self.content):,} bytes")
        self.place += num_bytes

    def _string(self) -> str:
        length = self._number("Q")
        self._skip(length)
        return self.content[self.place - length : self.place].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_form(kind))
        of, length = self._number("I"), self._number("Q")
        if of == _STRING:
            for _ in range(length):
                self._skip(self._number("Q"))
        else:
            self._skip(length * struct.calcsize(f"<{_form(of)}"))
        return length

    def _num_bytes(self) -> int:
        """The size of a tensor, from its shape and the type of its blocks."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        shape: list[int] = [self._number("Q") for _ in range(self._number("I"))]
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self._number("I"))]
        return math.prod(shape) // int(block_size) * int(block_bytes)


def _form(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"its header has a value of the unknown type {kind}")
    return _NUMBERS[kind]
