"""The servers of `sglang_throughput.py`: SGLang's own speculation, and rhymerl's backend."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.backends.sglang import arguments as server
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.backends.sglang.own import start_server
from rhymerl.drafters import Drafter, HistoryTreeDrafter, NGramDrafter, NoDrafter
from rhymerl.history import HistoryStore
from rhymerl.models.policy import Policy
from rhymerl.types import Completion, Output, RolloutRequest

NONE, HISTORY = "none", "history_tree"
STOCK, STOCK_NGRAM = "stock", "ngram"  # those without anything of ours
DRAFTERS: Mapping[str, type[Drafter]] = {
    NONE: NoDrafter,
    "ours_ngram": NGramDrafter,
    HISTORY: HistoryTreeDrafter,
}
EMBEDDED = "embedded"  # the engine in the trainer's own process, without drafts
MODES = (NONE, STOCK_NGRAM, "ours_ngram", HISTORY)
ON_CPU: Mapping[str, Any] = {  # the attention backend is the stand-ins', by a name that SGLang knows
    "device": "cpu",
    "attention_backend": "torch_native",
    "grammar_backend": "none",
    "mem_fraction_static": 0.5,
}
CPU_VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}


class StockServer:
    """SGLang's own n-gram speculation, asked as any client would; without nodes plain decoding.

    It has the part of RolloutBackend that is needed here, and SGLangBackend's arguments.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        nodes: int,
        max_running: int,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        start_timeout_s: float,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rhymerl-stock-")
        folder = Path(self._folder.name)
        policy.save(folder / "policy")
        words = server.words(
            model_path=str(folder / "policy"),
            dtype=str(policy.model.dtype).removeprefix("torch."),
            n=nodes + 1,
            max_running=max_running,
            tensor_parallel=1,
            algorithm="NGRAM",
            context_tokens=policy.context_tokens,
            more={"sleep_on_idle": True, **arguments},
        )
        self._nodes = nodes
        self._threads = ThreadPoolExecutor(max_running)
        self._flying: dict[Future[Any], RolloutRequest] = {}
        self._server = start_server(words, environment, folder / "engine.log")
        try:
            self._server.wait_until_ready(start_timeout_s)
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            answer = self._threads.submit(self._server.client.post, "/generate", question(request))
            self._flying[answer] = request

    def collect(self) -> list[Completion]:
        """Wait for at least one answer, and return all that are there."""
        done = wait(self._flying, return_when=FIRST_COMPLETED).done
        return [completion(self._flying.pop(each), each.result(), nodes=self._nodes) for each in done]

    def follow(self, history: HistoryStore) -> None:
        """Nothing: it knows what it has answered itself."""

    def metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        self._server.close()
        self._threads.shutdown(cancel_futures=True)
        self._folder.cleanup()


def question(request: RolloutRequest) -> dict[str, Any]:
    """Return what SGLang is asked, as rhymerl's backend asks it but for what only our drafters and draws need."""
    sampling = request.sampling
    return {
        "input_ids": request.prompt.token_ids.tolist(),
        "return_logprob": True,
        "logprob_start_len": -1,
        "sampling_params": {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_token_ids),
        },
    }


def completion(request: RolloutRequest, answer: Mapping[str, Any], *, nodes: int) -> Completion:
    """Return the request's answer and the count of its passes, as for our drafters, without tokens after a stop."""
    meta = answer["meta_info"]
    pairs = meta["output_token_logprobs"]
    tokens = np.array([pair[1] for pair in pairs], np.int32)
    stops = np.flatnonzero(np.isin(tokens, request.sampling.stop_token_ids))[:1] + 1
    end = int(stops[0]) if len(stops) else len(tokens)
    verified = int(meta.get("spec_verify_ct") or 0)  # passes after the one that read the prompt
    passes = min(1 + verified, len(tokens)) if nodes else len(tokens)
    return Completion(
        request=request,
        output=Output(
            token_ids=tokens[:end],
            logprobs=np.array([pair[0] for pair in pairs[:end]], np.float64),
            policy_versions=np.zeros(end, np.int32),
            finish_reason="stop" if len(stops) else "length",
            num_passes=passes,
            num_drafted=verified * nodes,
            num_accepted=len(tokens) - passes,
        ),
    )


def start(mode: str, policy: Policy, arguments: Namespace) -> StockServer | RolloutBackend:
    """A running server, that has the policy's weights."""
    if mode == EMBEDDED:
        engine = EmbeddedBackend(max_running=max(arguments.running))
        engine.start(policy, NoDrafter())
        return engine
    settings = server_settings(arguments)
    if mode in (STOCK, STOCK_NGRAM):
        return StockServer(policy, nodes=arguments.nodes if mode == STOCK_NGRAM else 0, **settings)
    backend = SGLangBackend(nodes=arguments.nodes, **settings)
    try:
        backend.start(policy, DRAFTERS[mode]())
        backend.sync_weights(policy.named_weights(), 0)
    except BaseException:
        backend.close()
        raise
    return backend


def server_settings(arguments: Namespace) -> dict[str, Any]:
    """Return what all servers have in common, by the names of SGLangBackend's arguments."""
    from omegaconf import OmegaConf  # which the embedded engine alone does not need

    largest = max(arguments.running)
    if torch.cuda.is_available():
        own: dict[str, Any] = {"mem_fraction_static": arguments.memory, "cuda_graph_max_bs_decode": largest}
    else:
        own = {**ON_CPU, "max_total_tokens": 1024 * largest}
    given = OmegaConf.to_container(OmegaConf.from_dotlist(arguments.server))
    variables = {} if torch.cuda.is_available() else CPU_VARIABLES
    return {
        "max_running": largest,
        "arguments": {"random_seed": arguments.seed, **own, **given},
        "environment": {**variables, **dict(word.split("=", 1) for word in arguments.environment)},
        "start_timeout_s": arguments.start_timeout_s,
    }
