"""What a pass needs on the model's device, in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNED = 16  # bytes


def on_host(device: torch.device) -> bool:
    """Return whether compiled CPU code reads the device's memory, so that nothing is copied."""
    return device.type == "cpu"


class Inputs:
    """Copies the arrays of a pass to a device at once, without waiting; from pinned memory if there is CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # the staging memory may be written again

    def put(self, arrays: Sequence[npt.NDArray[Any]], room_for: Callable[[int], Tensor] | None = None) -> list[Tensor]:
        """Return the arrays as tensors of the device; on a CPU these share the arrays' memory.

        `room_for` returns where they go, at least so many bytes (uint8); None: they get memory of their own.
        """
        if on_host(self.device):
            return [torch.from_numpy(each) for each in arrays]
        begins = np.cumsum([0, *(-(-each.nbytes // _ALIGNED) * _ALIGNED for each in arrays)]).tolist()
        self._reserve(begins[-1])
        host = self._staging.numpy()
        for each, begin in zip(arrays, begins, strict=False):
            host[begin : begin + each.nbytes].view(each.dtype).reshape(each.shape)[...] = each
        there = (room_for or self._memory)(begins[-1])[: begins[-1]]
        there.copy_(self._staging[: begins[-1]], non_blocking=self._copied is not None)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device))
        return [
            there[begin : begin + each.nbytes].view(torch.from_numpy(each[:0]).dtype).view(each.shape)
            for each, begin in zip(arrays, begins, strict=False)
        ]

    def _memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _reserve(self, size: int) -> None:
        """Make room for so many bytes; the copy before has been read by then."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        if size > len(self._staging):
            self._staging = torch.empty(2 * size, dtype=torch.uint8, pin_memory=self._copied is not None)
