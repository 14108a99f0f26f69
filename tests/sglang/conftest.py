"""Starts SGLang's engine on a CPU, in `make test-sglang`'s environment; standins/ holds what a CPU lacks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

STANDINS = Path(__file__).parent / "standins"
START_S = 300.0  # about 20 s on two idle cores


@dataclass(frozen=True, kw_only=True)
class CpuEngine:
    """The needs of an engine on a CPU: arguments of the server by their Python names, and variables of its process."""

    arguments: Mapping[str, Any] = field(
        default_factory=lambda: {
            "device": "cpu",
            "attention_backend": "torch_native",  # the name that standins/tree_attention.py takes over
            "grammar_backend": "none",
            "max_total_tokens": 8192,
            "mem_fraction_static": 0.5,
            "sleep_on_idle": True,  # else an idle engine spins
            "random_seed": 0,
        }
    )
    environment: Mapping[str, str] = field(
        default_factory=lambda: {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    )

    @contextmanager
    def launch(self, model: Path, log: Path, **arguments: Any) -> Iterator[StockServer]:
        """SGLang's own server, without anything of ours in it; all of its processes end with the block."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        own = {"model_path": model, "dtype": "float32", "skip_tokenizer_init": True, "host": "127.0.0.1", "port": port}
        flags = []
        for name, value in {**self.arguments, **own, **arguments}.items():
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *flags],
                env={**os.environ, **self.environment, "SGLANG_PLUGINS": "rhymerl_sglang_standins"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            server = StockServer(url=f"http://127.0.0.1:{port}")
            server.wait(process, log)
            yield server
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass(frozen=True, kw_only=True)
class StockServer:
    """A running server."""

    url: str

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Its JSON answer."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        """Wait until it is healthy; fail with the end of its log."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=10):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        pytest.fail("the server did not start:\n" + log.read_text(errors="replace")[-4000:])


@pytest.fixture(scope="session")
def cpu_engine() -> CpuEngine:
    """Fails where sglang or the stand-ins are missing: nothing is skipped."""
    version("sglang")
    found = find_spec("sgl_kernel")
    if found is None or found.origin is None or not Path(found.origin).is_relative_to(STANDINS):
        pytest.fail("the stand-ins of SGLang's CPU kernels are not on the path: run these tests by `make test-sglang`")
    plugins = {plugin.name for plugin in entry_points(group="sglang.srt.plugins")}
    assert "rhymerl_sglang_standins" in plugins
    return CpuEngine()
