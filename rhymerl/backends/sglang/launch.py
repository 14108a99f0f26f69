"""The command line of a server that is started by hand, with a drafter of ours inside."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from omegaconf import DictConfig

from rhymerl.backends.remote.client import Client
from rhymerl.backends.sglang import arguments
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.backends.sglang.plugin.names import ALGORITHM, VARIABLE
from rhymerl.backends.sglang.plugin.settings import EngineSettings
from rhymerl.budgets import Budget
from rhymerl.config import construct, instantiate, resolved
from rhymerl.drafters import RunAheadDrafter
from rhymerl.errors import ConfigError
from rhymerl.folders import open_folder
from rhymerl.models.places import is_gguf


def launch_line(config: DictConfig) -> dict[str, Any]:
    """Write what the server's processes read into `out`; returns its environment and its command line."""
    section = resolved(config)["backend"]
    url = section.pop("url", None)  # a trainer's: there the server runs already, and no argument is left to choose
    backend = instantiate(section, key="backend")
    if not isinstance(backend, SGLangBackend):
        raise ConfigError(f"backend={type(backend).__name__}: expected backend=sglang")
    drafter, source = instantiate(config.drafter, key="drafter"), instantiate(config.model, key="model")
    if source.path is None:
        raise ConfigError("model.path=None: expected a directory or hub name, which a server reads its model from")
    if is_gguf(source.path):
        raise ConfigError(
            f"model.path={source.path!r}: a server reads its model from a directory or hub name; "
            f"PolicySource({source.path!r}).load().save(DIR) writes one"
        )
    on_cpu = (backend.arguments or {}).get("device") == "cpu"
    dtype = arguments.engine_dtype(backend.dtype, source.dtype, on_cpu=on_cpu)
    ours = arguments.of_device("cpu" if on_cpu else "cuda", dtype=dtype, saves_memory=backend.release_memory)
    budget: Budget = instantiate(config.budget, key="budget")
    folder = open_folder(config.out, setting="out").resolve()
    # A trainer that runs ahead may come: without prefetched tokens it is the drafter alone.
    settings = EngineSettings.of(RunAheadDrafter(drafter), budget, folder, has_route=True).open()
    words = arguments.words(
        model_path=source.path,
        dtype=dtype,
        n=backend.num_tokens(drafter, budget),
        max_running=backend.max_running,
        tensor_parallel=backend.tensor_parallel,
        algorithm=ALGORITHM,
        context_tokens=None,
        more={**_address(url), **ours, **(backend.arguments or {})},
    )
    return {"environment": {VARIABLE: str(settings), **(backend.environment or {})}, "arguments": words}


def _address(url: str | Sequence[str] | None) -> dict[str, Any]:
    """Return the arguments by which the server listens at `url`; without one SGLang listens on its own machine only."""
    if url is None:
        return {}
    urls = [url] if isinstance(url, str) else url
    if len(urls) != 1:
        raise ConfigError(f"backend.url={url!r}: expected one address; the command line is that of one server")
    client = construct(Client.at, {"url": urls[0]}, key="backend")
    if client.scheme != "http" or client.path:
        raise ConfigError(
            f"backend.url={urls[0]!r}: expected http://HOST:PORT of the server to start, and nothing more"
        )
    return {"host": _listens_at(client.host), "port": client.port}


def _listens_at(host: str) -> str:
    """Return the address to listen at: all of the machine, which may have several names, or its loopback."""
    try:
        address = ip_address(host)
    except ValueError:  # a name
        return host if host == "localhost" else "0.0.0.0"
    return host if address.is_loopback else "::" if address.version == 6 else "0.0.0.0"


def shell_line(launch: dict[str, Any]) -> str:
    """Return the launch as a line to paste into a shell."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in launch["environment"].items()]
    return " ".join([*variables, "python -m sglang.launch_server", *map(shlex.quote, launch["arguments"])])
