"""A worker apart from the trainer, as the pool knows it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from rhymerl.backends.spans import SpanLog
from rhymerl.history import HistoryStore
from rhymerl.history.packing import PackedPrompt
from rhymerl.types import RolloutRequest, Split
from rhymerl.workers.messages import Events, HistoryUpdate
from rhymerl.workers.remote.base import Connection

_LOCATION = tuple[int, int, int]  # of an answer: epoch, sample, policy version


@dataclass(slots=True, kw_only=True)
class WorkerHandle:
    """A worker by number. The successor of a lost worker has the same number."""

    number: int
    connection: Connection
    is_late: bool = False  # nobody waits for it: it takes the place of one that was lost, or comes when there is room
    is_here: bool = False  # it has answered once
    since: float = field(default_factory=time.monotonic)  # it was started
    asked: Future[Events] | None = None
    asked_at: float = 0.0
    version: int | None = None  # of the policy with which it samples; None until it is up
    busy_s: float = 0.0
    spans: SpanLog = field(init=False)
    history_bytes: int = 0
    measured: deque[Mapping[str, float]] = field(default_factory=deque)
    remembered: dict[tuple[Split, str], set[_LOCATION]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spans = SpanLog(self.number)

    @property
    def is_up(self) -> bool:
        return self.version is not None

    @property
    def is_missing(self) -> bool:
        """Return whether the worker was lost and has no successor yet, which may come late or never."""
        return self.is_late and not self.is_up

    def ask(self, wait_s: float) -> Future[Events]:
        if self.asked is None:
            self.asked, self.asked_at = self.connection.poll(wait_s), time.monotonic()
        return self.asked

    def note(self, events: Events) -> None:
        self.is_here = True
        self.version = events.version
        self.busy_s += sum(span.seconds for span in events.spans if span.activity == "decode")
        for span in events.spans:
            self.spans.add(span)
        self.history_bytes = events.history_bytes
        self.measured += events.measured
        for name in events.forgotten:
            self.remembered.pop(name, None)

    def update_for(
        self, history: HistoryStore, requests: Iterable[RolloutRequest], *, newest: Iterable[PackedPrompt] = ()
    ) -> HistoryUpdate | None:
        """Return the history that the worker lacks: `newest` answers and all of these requests' prompts; else None."""
        prompts = {(request.split, request.prompt.key): request.prompt for request in requests}
        own = (
            PackedPrompt(split=split, key=key, token_ids=prompt.token_ids, answers=history.answers(prompt, split))
            for (split, key), prompt in prompts.items()
        )
        unknown = [fresh for each in (*newest, *own) if (fresh := self._unknown(each)).answers]
        return HistoryUpdate(prompts=unknown) if unknown else None

    def _unknown(self, prompt: PackedPrompt) -> PackedPrompt:
        """Return the prompt with the answers that the worker lacks, which count as known from now on."""
        known = self.remembered.setdefault((prompt.split, prompt.key), set())
        fresh = [each for each in prompt.answers if (each.epoch, each.sample, each.policy_version) not in known]
        known |= {(each.epoch, each.sample, each.policy_version) for each in fresh}
        return replace(prompt, answers=tuple(fresh))
