"""The engine that the backend starts itself: its process, and the files that its drafter shares with the trainer."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rhymerl.backends.remote import weights
from rhymerl.backends.remote.client import Client, NoAnswerError
from rhymerl.backends.remote.drafter_feed import Counters, FeedWriter, RemoteDrafter
from rhymerl.backends.remote.process import Server
from rhymerl.backends.sglang import arguments, memory
from rhymerl.backends.sglang.memory import MemorySplit
from rhymerl.backends.sglang.plugin.names import ALGORITHM, VARIABLE
from rhymerl.backends.sglang.plugin.settings import COUNTERS, FEED, EngineSettings
from rhymerl.backends.sglang.settings import SGLangSettings, require_sglang
from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.errors import BackendError, ConfigError
from rhymerl.models.policy import Policy
from rhymerl.models.recurrent import RECURRENT

_log = logging.getLogger(__name__)
_EVEN = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"  # refuses GPUs of which one has less free memory: the trainer's has
_DYING_S = 2.0  # from a broken connection to the end of the process


def check_layers(model: PreTrainedModel, *, on_cpu: bool, drafts: bool) -> None:
    """Raise ConfigError for layers with a recurrent state on a CPU; elsewhere say what no run has shown of them."""
    config = model.config.get_text_config()
    if not RECURRENT.intersection(getattr(config, "layer_types", None) or ()):
        return
    if on_cpu:
        raise ConfigError(
            f"backend=sglang: {config.model_type} has layers with a recurrent state, which SGLang does not run on a CPU; expected "
            "backend=embedded"
        )
    if drafts:
        _log.warning(
            "backend=sglang: %s has layers with a recurrent state, with which drafts in SGLang have not been tested; drafter=none does "
            "without them, and with backend=embedded they change no token",
            config.model_type,
        )


def start_server(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Server:
    """Start SGLang's server with these arguments; it listens on this machine only, and ends with this process."""

    def command(port: int, group_port: int) -> Sequence[str]:
        ours = ["--host", "127.0.0.1", "--port", str(port), "--nccl-port", str(group_port)]
        return [sys.executable, "-m", "rhymerl.backends.sglang.plugin.serve", *ours, *arguments]

    return Server(command, environment, log)


@dataclass(eq=False)
class OwnEngine:
    """Runs when it is made, until `close`; `renew` puts another in its place, `restarts` times at most."""

    is_ours = True

    settings: SGLangSettings
    policy: Policy
    drafter: Drafter
    budget: Budget | None  # None is goodput's
    _: KW_ONLY
    dtype: str
    folder: Path
    model: Path  # a folder with its config
    server: Server = field(init=False)
    remote_drafter: RemoteDrafter = field(init=False)
    split: MemorySplit | None = field(init=False, default=None)  # of the GPU, between engine and update

    def __post_init__(self) -> None:
        self.restarts_left, self.num_tokens = (
            self.settings.restarts,
            self.settings.num_tokens(self.drafter, self.budget),
        )
        self._context_tokens = weights.positions(self.policy.model, self.settings.longest_tokens)
        self._setup = self.settings.setup
        self._on_cpu = self.policy.device.type == "cpu"
        check_layers(self.policy.model, on_cpu=self._on_cpu, drafts=self.num_tokens > 1)
        self._start()

    def _start(self) -> None:
        saves_memory = self.settings.release_memory and not self._on_cpu
        require_sglang(memory_saver=saves_memory)
        file = EngineSettings.of(self.drafter, self.budget, self.folder).open()
        self.remote_drafter = RemoteDrafter(FeedWriter(self.folder / FEED), Counters(self.folder / COUNTERS))
        kind = "cpu" if self._on_cpu else "cuda"
        ours = arguments.of_device(kind, dtype=self.dtype, saves_memory=saves_memory)
        inherited = arguments.without_expandable_segments(os.environ)
        uneven = {_EVEN: "false"} if self.settings.tensor_parallel > 1 else {}
        environment = {VARIABLE: str(file), **inherited, **uneven, **(self.settings.environment or {})}
        self.server = start_server(self._words(ours), environment, self.folder / "engine.log")
        try:
            self.server.wait_until_ready(self.settings.start_timeout_s)
            found = EngineSettings.read_report(self.folder)
            found.check(drafts=self.num_tokens > 1, on_cpu=self._on_cpu)
        except BaseException:
            self.server.close()
            raise

    def _words(self, ours: Mapping[str, Any]) -> list[str]:
        index = {} if self._on_cpu else {"base_gpu_id": self.policy.device.index or 0, **self._static_memory()}
        return arguments.words(
            model_path=str(self.model),
            dtype=self.dtype,
            n=self.num_tokens,
            max_running=self.settings.max_running,
            tensor_parallel=self.settings.tensor_parallel,
            algorithm=ALGORITHM,
            context_tokens=self._context_tokens,
            more={"load_format": "dummy", "sleep_on_idle": True, **index, **ours, **(self.settings.arguments or {})},
        )

    def _static_memory(self) -> dict[str, Any]:
        """Return the argument that leaves the update its memory.

        A successor gets the bytes of the first engine, though optimizer moments may exist by then.
        """
        setup = self._setup
        if self.policy.device.type != "cuda" or setup is None or memory.is_given(self.settings.arguments or {}):
            return {}
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.policy.device)
        if self.split is None:
            engine = self.settings.memory(setup.model, self.drafter, self.budget)
            self.split = memory.split(replace(setup, engine=engine), free_bytes=free, total_bytes=total)
            _log.info("%s", self.split)
        return {memory.ARGUMENT: self.split.fraction_of(free)}

    @property
    def client(self) -> Client:
        return self.server.client

    def check(self, is_suspect: bool = False) -> None:
        """Raise NoAnswerError with the end of its log when it has died; a suspect may be about to."""
        if self.server.dies_within(_DYING_S if is_suspect else 0.0):
            self.server.check()

    def renew(self, error: BackendError) -> None:
        """Replace an engine that is dead or, by `error`, hangs. Raises `error` if it is neither or may not restart."""
        if not self.server.dies_within(_DYING_S):
            if not isinstance(error, NoAnswerError):
                raise error
            if self.restarts_left <= 0:
                raise NoAnswerError(f"{error}; {self.server.last_words()}") from error
        elif self.restarts_left <= 0:
            self.server.check()
        self.restarts_left -= 1
        self.server.close()
        self._start()

    def close(self) -> None:
        """End all of its processes; may be called twice."""
        self.server.close()
