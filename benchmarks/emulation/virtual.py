"""Workers on a virtual clock: real passes, real drafts, a real scheduler, and no waiting.

On a worker's clock a pass takes what it costs on the emulated device, and all that is done beside the model takes the
CPU time that it took its thread here: drafting, layout, draws, history, messages. Loading weights takes what a device
of that size needs. Workers keep step with the trainer in ticks of a millisecond, so that tokens, drafts and plans are
those that the costs lead to, however fast this machine is.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.emulation.device import EmulatedBackend, EmulatedDevice
from benchmarks.emulation.threads import ThreadBackend
from rhymerl.backends.spans import WorkerSpan
from rhymerl.engine.layout import PassLayout
from rhymerl.history import HistoryStore
from rhymerl.workers.messages import Events, HostMessage, Weights
from rhymerl.workers.remote.base import Connection
from rhymerl.workers.remote.host import EngineLoader, WorkerHost
from rhymerl.workers.remote.servers import ThreadConnection

TICK_S = 1e-3
_REPORT_S = 0.5
_NO_NODES = np.zeros(1)


@dataclass(slots=True, kw_only=True)
class VirtualDevice(EmulatedDevice):
    """A device on a clock of its own, which belongs to the thread that asks. Its parts are in `spent`, in seconds.

    A second of CPU time beside the passes is `cpu` seconds of this clock.
    """

    cpu: float = 1.0
    elsewhere_s: float = field(default=0.0, init=False)  # CPU time of this thread that is not on the clock
    spent: Counter[str] = field(default_factory=Counter, init=False)

    def now(self) -> float:
        return self.cpu * time.thread_time() - self.elsewhere_s + self.charged_s

    def wait(self, started: float, layout: PassLayout) -> None:
        """Replace the CPU time of a pass, and that of this sum, by what the pass costs."""
        charged = self.seconds(layout)
        self.spent["passes"] += charged
        nodes = len(layout.node_index)
        if nodes:
            sizes = (layout.num_tokens - nodes, layout.num_tokens, self.num_computed(layout))
            fewer, more, padded = (float(self.curve.seconds(size, _NO_NODES, 0)[0]) for size in sizes)
            self.spent["nodes"] += self.scale * (more - fewer)
            self.spent["padding"] += self.scale * (padded - more)
        self.elsewhere_s += self.now() - started
        self.charged_s += charged

    def charge(self, part: str, seconds: float, started: float) -> None:
        """Replace what has been done since `started` by so many seconds."""
        self.elsewhere_s += self.now() - started
        self.charged_s += seconds
        self.spent[part] += seconds


class VirtualEngine(EmulatedBackend):
    """The embedded engine on such a device."""

    def __init__(self, device: VirtualDevice, **settings: Any) -> None:
        super().__init__(emulate=device, **settings)

    @property
    def has_started(self) -> bool:
        return self._engine is not None


class VirtualHost(WorkerHost):
    """Goes on until its device's clock has gone on for so many ticks, or it has nothing to do."""

    def __init__(self, number: int, trainer: VirtualWorkers, load: EngineLoader, device: VirtualDevice) -> None:
        super().__init__(load, history=HistoryStore(), budget=load.budget)
        self.device = device
        self._number = number
        self._trainer = trainer
        self._left_s = 0.0  # below 0: it is ahead of the trainer's clock
        self._reported_s = 0.0

    def go_on(
        self, messages: Sequence[bytes | Weights], ticks: int, at_s: float, *, only_evaluates: bool = False
    ) -> Events:
        """Take messages, and work from `at_s` of the trainer's clock on."""
        device = self.device
        began = device.now()
        at_s -= min(self._left_s, 0.0)
        self._left_s = min(self._left_s, 0.0) + ticks * TICK_S
        try:
            for message in messages:
                self.post(pickle.loads(message) if isinstance(message, bytes) else message)
            self._rest(only_evaluates)
            self._take_messages()
            self.submit_waiting()
            while self.is_running and (left := self._left_s - (device.now() - began)) > 0:
                started, step = device.now(), min(self._num_running)
                self._collect(timeout_s=left)  # whose clock is the device's; `decode` goes by the real one
                self._add_span(step, at_s - began + started, at_s - began + device.now())
                self.submit_waiting()
            if device.now() - self._reported_s > _REPORT_S:
                self._reported_s = device.now()
                self._report_outputs()
            self._report()
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            self._report(error)
        events = self._taken()
        pickle.dumps((events.finished, events.released, events.deltas))
        used = device.now() - began
        device.spent["busy"] += used
        self._left_s -= used
        return events

    def _add_span(self, step: int, start_s: float, end_s: float) -> None:
        span = WorkerSpan(worker=self._number, activity="decode", number=step, start_s=start_s, end_s=end_s)
        self._trainer.spans.append(span)

    def _take_weights(self, message: Weights) -> None:
        started = self.device.now()
        super()._take_weights(message)
        self.device.charge("weights", self._trainer.weights_s, started)


class VirtualConnection(ThreadConnection):
    """Messages and events are pickled, as on their way to another process; that time is the worker's."""

    def __init__(self, host: VirtualHost, trainer: VirtualWorkers) -> None:
        super().__init__(host, lockstep=True)
        self._virtual = host
        self._trainer = trainer
        self._inbox: list[bytes | Weights] = []

    def post(self, message: HostMessage) -> None:
        self._inbox.append(message if isinstance(message, Weights) else pickle.dumps(message))

    def step(self, ticks: int, *, only_evaluates: bool = False) -> Future[Events]:
        (inbox, self._inbox), at_s = (self._inbox, []), self._trainer.clock_s
        return self._asked(lambda: self._virtual.go_on(inbox, ticks, at_s, only_evaluates=only_evaluates))


class VirtualWorkers(ThreadBackend):
    """Workers whose passes cost what the file `emulate` says.

    One of our tokens stands for `lengths` of the device's; `widths` are an `EmulatedDevice`'s. `update_s` is what the
    trainer's update takes, `weights_s` the load of weights by a worker, `cpu` what a second of CPU time is. Whoever
    runs the trainer moves `clock_s`, the trainer's clock, on.
    """

    ticks_per_exchange = 20

    def __init__(
        self,
        *,
        emulate: str,
        lengths: float = 1.0,
        widths: Sequence[int] = (),
        update_s: float = 0.0,
        weights_s: float = 0.0,
        cpu: float = 1.0,
        **engine: Any,
    ) -> None:
        super().__init__(self._engine)
        self.emulate = emulate
        self.lengths = lengths
        self.widths = widths
        self.update_s = update_s
        self.weights_s = weights_s
        self.cpu = cpu
        self.engine = engine
        self.max_running = engine.get("max_running")
        self.clock_s = 0.0
        self.devices: list[VirtualDevice] = []  # all that there have been
        self._engines: list[VirtualEngine] = []  # and theirs
        self.spans: list[WorkerSpan] = []  # on the trainer's clock

    def _engine(self, number: int) -> VirtualEngine:
        device = VirtualDevice.read(self.emulate, scale=1.0, lengths=self.lengths)
        device.cpu, device.widths = self.cpu, self.widths
        self.devices.append(device)
        self._engines.append(VirtualEngine(device, **self.engine))
        return self._engines[-1]

    def connect(self, number: int, *, lockstep: bool) -> Connection:
        load = self.load(number)
        connection = VirtualConnection(VirtualHost(number, self, load, self.devices[-1]), self)
        self.connections.append(connection)
        return connection

    @property
    def spent(self) -> Counter[str]:
        """Return the seconds of all workers by part, and the `tokens` of passes with their `request_passes`."""
        spent = sum((device.spent for device in self.devices), Counter())
        totals = [engine.engine.totals for engine in self._engines if engine.has_started]
        spent["draft"] = sum(each.draft_s for each in totals)
        spent["tokens"] = sum(each.emitted_tokens for each in totals)
        spent["request_passes"] = sum(each.request_passes for each in totals)
        return spent

    def ticks_of_update(self, num_exchanges: int) -> int:
        return round(self.update_s / TICK_S)
