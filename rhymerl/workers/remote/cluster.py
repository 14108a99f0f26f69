"""A Ray cluster seen from outside: whether it answers, and how many workers fit. Nothing here imports Ray."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_CONNECT_S = 5.0
_SETTINGS_FRAME = 4  # the type of the frame with which a gRPC server greets everyone; RFC 9113, section 6.5


def started_here() -> str | None:
    """Return the address of the cluster that `ray start` has made this machine a part of, None where there is none.

    Ray's own `auto` would take any cluster that runs here too, such as another run's, which ends with it.
    """
    file = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "ray_current_cluster")
    if not file.is_file():
        return None
    address = file.read_text().strip()
    return address if answers(address) else None


def answers(address: str) -> bool:
    """Return whether a cluster may be there: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():  # `auto`, or a name that Ray knows
        return True
    try:
        with socket.create_connection((host, int(port)), _CONNECT_S) as connection:
            return os.environ.get("RAY_USE_TLS") == "1" or connection.recv(9)[3:4] == bytes([_SETTINGS_FRAME])
    except OSError:
        return False


def places(nodes: Sequence[Mapping[str, Any]], each: Mapping[str, float]) -> int:
    """Return for how many workers that take `each` of a node the nodes have room, once nothing else is there.

    `nodes` are what `ray.nodes()` returns.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    return sum(int(min(has.get(name, 0) // amount for name, amount in each.items())) for has in alive)


def words_of(amounts: Mapping[str, float]) -> str:
    """Return `4 CPU and 2 GPU` for resources by name."""
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())
