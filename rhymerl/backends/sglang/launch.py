"""The command line of a server that is started by hand, with a drafter of ours inside."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from rhymerl.backends.sglang import arguments
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.backends.sglang.own import ALGORITHM
from rhymerl.backends.sglang.plugin import VARIABLE
from rhymerl.backends.sglang.settings import EngineSettings
from rhymerl.config import instantiate
from rhymerl.drafters import RunAheadDrafter
from rhymerl.errors import ConfigError
from rhymerl.folders import open_folder

if TYPE_CHECKING:
    from omegaconf import DictConfig


def launch_line(config: DictConfig) -> dict[str, Any]:
    """Write what the server's processes read into `out`; returns its environment and its command line.

    The history that such a server drafts from is that of the answers it gives itself: running siblings, and the request's own text.
    """
    backend = instantiate(config.backend, key="backend")
    if not isinstance(backend, SGLangBackend):
        raise ConfigError(f"backend={type(backend).__name__}: expected backend=sglang")
    drafter = instantiate(config.drafter, key="drafter")
    # A trainer that runs ahead may come: without tokens drawn ahead it is the drafter alone.
    settings = EngineSettings.of(RunAheadDrafter(drafter), open_folder(config.out, setting="out").resolve()).open()
    words = arguments.words(
        model_path=str(config.model.path),
        dtype=backend.dtype or "auto",
        n=backend.num_tokens(drafter),
        max_running=backend.max_running,
        tensor_parallel=backend.tensor_parallel,
        algorithm=ALGORITHM,
        context_tokens=None,
        more=backend.arguments,
    )
    return {"environment": {VARIABLE: str(settings), **backend.environment}, "arguments": words}


def shell_line(launch: dict[str, Any]) -> str:
    """To be pasted into a shell."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in launch["environment"].items()]
    return " ".join([*variables, "python -m sglang.launch_server", *map(shlex.quote, launch["arguments"])])
