"""A server that runs already: whether it fits the trainer, how it drafts, and the plugin's route to its drafter."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rhymerl.backends.remote.addresses import engines_at
from rhymerl.backends.remote.client import Client
from rhymerl.backends.remote.drafter_feed import COUNTS, LARGEST_BYTES, ROUTE, Counters, FeedMessage, RemoteDrafter
from rhymerl.backends.sglang.nodes import AllowedNodes
from rhymerl.backends.sglang.plugin.names import ALGORITHM
from rhymerl.backends.sglang.settings import SGLangSettings
from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.drafters.wrapped import innermost
from rhymerl.errors import BackendError, ConfigError
from rhymerl.history.files import to_bytes
from rhymerl.history.packing import pack_delta

_log = logging.getLogger(__name__)
_WITHOUT_HISTORY = (
    ", and not from this run's history, which it does not take (start it as this version's `rhymerl sglang-args` says)"
)
_LOSSY = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


class RunningServer:
    """A server at the one address of `settings`, with what is asked of an engine, as of `OwnEngine`.

    `num_tokens` is how many tokens each request has in a pass, its last one included: 1 without drafts. Which drafter
    it has the server does not tell: a warning says that it has to be the run's, and whether history does not get there.
    Its end is nobody's here, nor is there a successor. Raises ConfigError for several servers, and for one whose drafts
    change what is sampled, or that is not what the settings say; BackendError for what is no such server's answer, as a
    proxy's page.
    """

    is_ours = False
    split = None

    def __init__(self, settings: SGLangSettings, drafter: Drafter, budget: Budget | None) -> None:
        found, *others = engines_at(settings.addresses)
        if others:
            urls = [each.url for each in settings.addresses]
            raise ConfigError(f"backend.url={urls}: several servers are workers, each with its own backend")
        self.client = found.another(timeout_s=settings.silence_timeout_s)
        self.remote_drafter = _drafter_at(self.client)
        self.num_tokens = _tokens_a_pass(self.client, settings, drafter, budget)
        if self.num_tokens > 1:
            _log.warning(
                "the SGLang server at %s drafts with the drafter that it was started with%s; drafter=%s of this run has to be the same",
                self.client.url,
                "" if self.remote_drafter is not None else _WITHOUT_HISTORY,
                type(innermost(drafter)).__name__,
            )

    def check(self, is_suspect: bool = False) -> None:
        """Do nothing: its answers alone tell whether it is well."""

    def renew(self, error: BackendError) -> None:
        raise error

    def close(self) -> None:
        """Leave it as it is."""


# -- what it was started with ------------------------------------------------------------------------------------------


def _tokens_a_pass(engine: Client, settings: SGLangSettings, drafter: Drafter, budget: Budget | None) -> int:
    info = engine.get_if_known("/server_info")
    if info is None:
        return settings.num_tokens(drafter, budget)
    if not isinstance(info, Mapping):
        raise BackendError(
            f"the SGLang engine at {engine.url} answered /server_info with {info!r:.100}; expected a JSON object"
        )
    for wrong in _faults(info, settings):
        raise ConfigError(f"backend.url={engine.url!r}: the server there has {wrong}")
    found = _draft_tokens(info, engine) if info.get("speculative_algorithm") else 1
    _check_drafts(engine, found - 1, settings.allowed_nodes(drafter, budget), drafter)
    return found


def _draft_tokens(info: Mapping[str, Any], engine: Client) -> int:
    told = info.get("speculative_num_draft_tokens")
    if told is not None and (type(told) is not int or told < 0):
        raise BackendError(
            f"the SGLang engine at {engine.url} says speculative_num_draft_tokens={told!r:.100}; expected a count"
        )
    return told or 1


def _check_drafts(engine: Client, nodes: int, allowed: AllowedNodes, drafter: Drafter) -> None:
    """Raise ConfigError unless the server drafts where the run does, and as many nodes."""
    if nodes not in allowed:
        raise ConfigError(
            f"backend.url={engine.url!r}: the server there verifies {nodes} draft nodes of a request; expected {allowed}, "
            f"as {allowed.setting} says; `rhymerl sglang-args backend.nodes=…` starts one"
        )
    if nodes and isinstance(drafter, NoDrafter):
        raise ConfigError(
            f"backend.url={engine.url!r}, drafter=none: the server there verifies {nodes} draft nodes of a request; expected the drafter "
            "that it was started with"
        )
    if not nodes and allowed.exact != 0 and not isinstance(drafter, NoDrafter):
        raise ConfigError(
            f"backend.url={engine.url!r}, drafter={type(innermost(drafter)).__name__}: the server there drafts nothing; expected "
            "drafter=none, or a server that `rhymerl sglang-args` starts with this drafter"
        )


def _faults(info: Mapping[str, Any], settings: SGLangSettings) -> Iterator[str]:
    drafts = info.get("speculative_algorithm")
    # SGLang's n-grams bias what is sampled; draft models would be given the policy's weights.
    if drafts not in (None, ALGORITHM):
        yield f"speculative_algorithm={drafts}; expected none, or {ALGORITHM} as rhymerl sglang-args starts it"
    for name in _LOSSY:
        if drafts and info.get(name) not in (None, 1.0):
            yield f"{name}={info[name]}, below 1 its drafts change what is sampled"
    if info.get("dp_size", 1) != 1:
        yield f"dp_size={info['dp_size']}; start as many servers instead"
    if info.get("tp_size", settings.tensor_parallel) != settings.tensor_parallel:
        yield f"tp_size={info['tp_size']}; expected backend.tensor_parallel={settings.tensor_parallel}"
    if info.get("max_running_requests", settings.max_running) != settings.max_running:
        yield f"max_running_requests={info['max_running_requests']}; expected backend.max_running={settings.max_running}"
    if settings.release_memory and not info.get("enable_memory_saver", True):
        yield "no --enable-memory-saver, so backend.release_memory=true would free nothing"


# -- its drafter -------------------------------------------------------------------------------------------------------


def _drafter_at(engine: Client) -> RemoteDrafter | None:
    """Return the drafter of a server, None without our route. Raises BackendError as `Client.get` does."""
    if not _is_ours(engine.get_if_known(ROUTE)):
        return None
    return RemoteDrafter(FeedSender(engine), ServedCounters(engine))


class FeedSender:
    """Sends the history; `version` is the latest message's there, and skips some if others send messages too."""

    def __init__(self, engine: Client) -> None:
        self.engine = engine
        self.version = 0

    def write(self, feed: FeedMessage) -> None:
        """Send the next change. Raises BackendError for one that is too large, and as `Client.post` does."""
        assert feed.delta is not None, "samples do not travel"
        content = to_bytes(pack_delta(feed.delta))
        if len(content) > LARGEST_BYTES:
            raise BackendError(
                f"{len(content)} bytes of history for {self.engine.url}: at most {LARGEST_BYTES} can be sent at once"
            )
        answer = self.engine.post(ROUTE, content)
        version = answer.get("version") if isinstance(answer, dict) else None
        if not isinstance(version, int):
            raise _unknown(answer, self.engine)
        self.version = version


class ServedCounters(Counters):
    """The counts from when this is made, as they were when `since` was last called."""

    def __init__(self, engine: Client) -> None:
        self._engine = engine
        self._values = self._reported = self._begun = self._asked()

    def since(self) -> Mapping[str, float]:
        """Ask for the counts, and return those since the last call. Raises BackendError as `Client.get` does."""
        self._values = self._asked()
        return super().since()

    def _asked(self) -> npt.NDArray[np.float64]:
        answer = self._engine.get(ROUTE)
        if not _is_ours(answer):
            raise _unknown(answer, self._engine)
        counts = answer["counters"]
        return np.array([counts.get(name, 0.0) for name in COUNTS], np.float64)


def _is_ours(answer: Any) -> bool:
    """Return whether the route has answered, and not some page that stands where it would be."""
    counts = answer.get("counters") if isinstance(answer, dict) else None
    return isinstance(counts, dict) and all(isinstance(value, int | float) for value in counts.values())


def _unknown(answer: Any, engine: Client) -> BackendError:
    return BackendError(
        f"the SGLang engine at {engine.url} answered {ROUTE} with what is not rhymerl's: {str(answer)[:200]}"
    )
