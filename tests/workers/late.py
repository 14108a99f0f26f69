"""Workers in threads whose messages come late at random, and engines that note what each of their passes computes."""

from __future__ import annotations

import random
import threading
import time

from benchmarks.emulation.threads import ThreadBackend
from rhymerl.history import HistoryStore
from rhymerl.workers.remote.host import WorkerHost
from rhymerl.workers.remote.servers import ThreadConnection
from tests.rollout.tokens import TokenBackend

Pass = tuple[int, tuple[tuple[str, int], ...]]  # the policy's version; ids of requests with tokens that they had


class LateConnection(ThreadConnection):
    """Half of what one thread hands to another is late by `late_s`: messages, questions and what is told."""

    def __init__(self, host: WorkerHost, *, lockstep: bool, draw: random.Random, late_s: float) -> None:
        super().__init__(host, lockstep=lockstep)
        self._draw, self._late_s, self._drawing = draw, late_s, threading.Lock()

    def _be_late(self) -> None:
        with self._drawing:
            late_s = self._draw.choice([0.0, self._late_s])
        time.sleep(late_s)

    def post(self, message):
        self._be_late()
        super().post(message)

    def _told(self, ask):
        self._be_late()
        events = super()._told(ask)
        self._be_late()
        return events


class LateBackend(ThreadBackend):
    """How late a message is follows from `seed` and the worker."""

    def __init__(self, make, *, seed: int, late_s: float) -> None:
        super().__init__(make)
        self._seed, self._late_s = seed, late_s

    def connect(self, number: int, *, lockstep: bool):
        host, draw = WorkerHost(self.load(number), history=HistoryStore()), random.Random(f"{self._seed}/{number}")
        self.connections.append(LateConnection(host, lockstep=lockstep, draw=draw, late_s=self._late_s))
        return self.connections[-1]


class NotingBackend(TokenBackend):
    """Notes its passes, and sees what there is of its requests, as embedded engines do."""

    def __init__(self, length, **settings) -> None:
        super().__init__(length, **settings)
        self.passes: list[Pass] = []

    def _pass(self):
        running = list(self.answers.items())[: self.max_running]
        self.passes.append((self.version, tuple((name, len(tokens)) for name, (_, tokens, _) in running)))
        return super()._pass()

    def outputs(self):
        return [self._completion(name, "withdrawn") for name, (_, tokens, _) in self.answers.items() if tokens]
