"""A backend that draws a token a pass for each running request, of its seed, its place and the policy's version."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rhymerl.backends.base import RolloutBackend
from rhymerl.types import Completion, Output, RolloutRequest


def token(seed: int, index: int, version: int) -> int:
    return (seed + 7 * index + 13 * version) % 50 + 2


class TokenBackend(RolloutBackend):
    """`length` says how long an answer will be; a pass takes `pass_s`."""

    counts_passes = True

    def __init__(self, length: Callable[[RolloutRequest], int], *, max_running: int = 4, pass_s: float = 0.0) -> None:
        self.length, self.max_running, self.pass_s = length, max_running, pass_s
        self.version = 0
        self.num_passes = 0
        self.num_sampled = 0  # tokens
        self.answers: dict[str, tuple[RolloutRequest, list[int], list[int]]] = {}  # request, tokens and versions

    def start(self, policy: Any, drafter: Any, **settings: Any) -> None:
        """Nothing to bring up."""

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            assert request.id not in self.answers
            before = request.output
            tokens = before.token_ids.tolist() if before else []
            versions = before.policy_versions.tolist() if before else []
            self.answers[request.id] = request, tokens, versions

    def collect(self, timeout_s: float | None = None, *, max_passes: int | None = None) -> list[Completion]:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        found: list[Completion] = []
        passes = 0
        while self.answers and (max_passes is not None or not found) and passes != max_passes:
            if until is not None and time.monotonic() >= until:
                break
            found += self._pass()
            passes += 1
        return found

    def _pass(self) -> list[Completion]:
        time.sleep(self.pass_s)
        self.num_passes += 1
        ended = []
        for request, tokens, versions in list(self.answers.values())[: self.max_running]:
            self.num_sampled += 1
            tokens.append(token(request.seed, len(tokens), self.version))
            versions.append(self.version)
            if len(tokens) >= self.length(request):
                ended.append(self._leave(request.id, "stop"))
        return ended

    def _leave(self, name: str, reason: Any) -> Completion:
        completion = self._completion(name, reason)
        del self.answers[name]
        return completion

    def _completion(self, name: str, reason: Any) -> Completion:
        request, tokens, versions = self.answers[name]
        output = Output(
            token_ids=np.array(tokens, np.int32),
            logprobs=-np.array(tokens, np.float64),
            policy_versions=np.array(versions, np.int32),
            finish_reason=reason,
            num_passes=len(tokens),  # one token a pass
        )
        return Completion(request=request, output=output)

    def withdraw(self, ids: Iterable[str] | None = None) -> list[Completion]:
        wanted = list(self.answers) if ids is None else [name for name in ids if name in self.answers]
        return [self._leave(name, "withdrawn") for name in wanted]

    def progress(self) -> Mapping[str, int]:
        return {name: len(tokens) for name, (_, tokens, _) in self.answers.items()}

    def sync_weights(self, named_tensors: Any, policy_version: int) -> None:
        self.version = policy_version

    def metrics(self) -> Mapping[str, float]:
        return {"passes": self.num_passes}


def expected(completion: Completion) -> list[int]:
    """The tokens that the policies of its versions draw for the request."""
    versions = completion.output.policy_versions.tolist()
    return [token(completion.request.seed, index, version) for index, version in enumerate(versions)]


def plain(request: RolloutRequest) -> RolloutRequest:
    """Return the request without what it brings along."""
    return replace(request, output=None, prefetched=None)
