"""Functions on several ranks, each in a process of its own, as a launcher would start them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.integration import programs


def start_ranks(size: int, function: Callable[..., None], *arguments: Any, output: Path) -> list[ForkServerProcess]:
    """`function(*arguments)` on each rank; what rank r prints goes to the file `output`.r."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [programs.run(_rank, rank, size, port, str(output), function, *arguments) for rank in range(size)]


def run_ranks(size: int, function: Callable[..., None], *arguments: Any, output: Path, timeout_s: float = 300) -> None:
    """The same to its end; what a failed rank has printed is the error."""
    processes = start_ranks(size, function, *arguments, output=output)
    for process in processes:
        process.join(timeout_s)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * size, "\n".join(said(output, rank) for rank in range(size))


def said(output: Path, rank: int) -> str:
    return Path(f"{output}.{rank}").read_text()


def _rank(rank: int, size: int, port: int, output: str, function: Callable[..., None], *arguments: Any) -> None:
    import torch
    from lightning.pytorch.utilities import rank_zero_only

    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": 0, "LOCAL_RANK": rank, "WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in names.items()})
    rank_zero_only.rank = rank  # set when lightning is imported, which it was before
    torch.set_num_threads(1)
    file = os.open(f"{output}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    function(*arguments)
