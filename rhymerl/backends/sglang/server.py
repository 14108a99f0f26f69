"""SGLang's server as a process of the trainer: its command line, and whether SGLang is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rhymerl.backends.remote.process import Server
from rhymerl.errors import ConfigError


def require_sglang(*, memory_saver: bool) -> None:
    """Raise ConfigError when SGLang is not installed, or not the package with which it gives memory back."""
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError("backend=sglang: sglang is not installed; pip install 'rhymerl[sglang]'")
    if memory_saver and importlib.util.find_spec("torch_memory_saver") is None:
        raise ConfigError(
            "backend.release_memory=true: expected torch_memory_saver to be installed, which comes with sglang"
        )


def start_server(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Server:
    """Start SGLang's server with these arguments; it listens on this machine only, and ends with this process."""

    def command(port: int, group_port: int) -> Sequence[str]:
        ours = ["--host", "127.0.0.1", "--port", str(port), "--nccl-port", str(group_port)]
        return [sys.executable, "-m", "rhymerl.backends.sglang.plugin.serve", *ours, *arguments]

    return Server(command, environment, log)
