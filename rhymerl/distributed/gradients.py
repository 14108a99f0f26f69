"""The sum of gradients over the ranks of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sum_gradients(parameters: Sequence[nn.Parameter], *, bucket_bytes: int = 25 * 2**20) -> None:
    """Add up each parameter's gradient over all ranks, in place. Every rank gives the same parameters.

    Where a rank has no gradient it adds zeros; where none has one it stays None, so that the optimizer skips that
    parameter as it would on one rank. At most two buckets are held at a time, each of `bucket_bytes` or one parameter.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    sent: _Bucket | None = None
    for chosen in buckets(trained, bucket_bytes):
        following = _Bucket(chosen)
        if sent is not None:
            sent.receive()
        sent = following
    if sent is not None:
        sent.receive()


def buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one dtype and device, in order, as many as stay within `bucket_bytes` (one always does)."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for kind in kinds.values():
        current: list[nn.Parameter] = []
        size = 0
        for parameter in kind:
            if current and size + parameter.nbytes > bucket_bytes:
                yield current
                current, size = [], 0
            current.append(parameter)
            size += parameter.nbytes
        yield current


class _Bucket:
    """Gradients on their way, as one flat tensor; behind them stands, for each, how many ranks have it."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        held = [parameter.grad is not None for parameter in parameters]
        self._flat = torch.cat([*map(_flat_gradient, parameters), parameters[0].new_tensor(held)])
        self._work = dist.all_reduce(self._flat, async_op=True)

    def receive(self) -> None:
        """Wait for the sums and put them where the gradients are."""
        self._work.wait()
        sizes = [parameter.numel() for parameter in self._parameters]
        *sums, counts = self._flat.split([*sizes, len(sizes)])
        for parameter, total, count in zip(self._parameters, sums, counts.tolist(), strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(total.view_as(parameter))


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    return parameter.new_zeros(parameter.numel()) if parameter.grad is None else parameter.grad.flatten()
