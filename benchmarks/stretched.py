"""Rows of headline.py in real time: engines and updates that last `--stretch` times as long as the device's, waiting while they are done early.

Threads, messages, schedulers and modes are then those of a real run, on a real clock. Beside it the same row on the virtual clock, where the CPU time beside
passes counts as much less as it does in a stretched run. `stretched_s` and `virtual_s` are seconds of the device from the first request to the end of the last
step. A run in which passes or updates were late by more than `--overrun` of the time is refused: the machine was too slow for it.

    python benchmarks/stretched.py
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import headline
import record
from emulation import EmulatedDevice
from virtual import VirtualEngine

from rhymerl.config import compose
from rhymerl.history import HistoryStore
from rhymerl.runs.fit import fit
from rhymerl.training.module import RhymeModule
from rhymerl.training.updater import Updater
from rhymerl.workers.messages import Weights
from rhymerl.workers.remote.base import Connection
from rhymerl.workers.remote.host import WorkerHost
from rhymerl.workers.remote.hosted import HostedWorkers
from rhymerl.workers.remote.threads import ThreadBackend, ThreadConnection

ROWS = [
    headline.BARRIER,
    headline.Row("history_tree", "fifo", "off"),
    headline.Row("history_tree", "packed", "draft"),
    headline.Row("history_tree", "packed", "keep"),
]


class StretchedHost(WorkerHost):
    """Loads weights as slowly as the device."""

    def __init__(self, load: Callable[..., Any], *, weights_s: float) -> None:
        super().__init__(load, history=HistoryStore())
        self._weights_s = weights_s

    def _take_weights(self, message: Weights) -> None:
        until = time.monotonic() + self._weights_s
        super()._take_weights(message)
        time.sleep(max(until - time.monotonic(), 0.0))


class StretchedWorkers(ThreadBackend):
    """As `VirtualWorkers`, in real time: seconds of the device last `stretch` seconds."""

    running: StretchedWorkers  # the latest one, which the config makes by name

    def __init__(self, *, emulate: str, stretch: float, lengths: float, weights_s: float, **engine: Any) -> None:
        super().__init__(self._engine)
        self.emulate = emulate
        self.stretch = stretch
        self.lengths = lengths
        self.weights_s = weights_s
        self.engine = engine
        self.max_running = engine.get("max_running")
        self.devices: list[EmulatedDevice] = []
        StretchedWorkers.running = self

    def _engine(self, number: int) -> VirtualEngine:
        device = EmulatedDevice.read(self.emulate, scale=self.stretch, lengths=self.lengths)
        self.devices.append(device)
        return VirtualEngine(device, **self.engine)

    def connect(self, number: int, *, lockstep: bool) -> Connection:
        host = StretchedHost(self.load(number), weights_s=self.stretch * self.weights_s)
        connection = ThreadConnection(host, lockstep=lockstep)
        self.connections.append(connection)
        return connection

    @property
    def overrun_frac(self) -> float:
        """The part of the passes' time by which they lasted too long."""
        charged = sum(device.charged_s for device in self.devices)
        return sum(device.overrun_s for device in self.devices) / charged


def run(row: headline.Row, arguments: Any, *, update_s: float) -> tuple[float, float]:
    """Return the seconds of a row, as the device's, and the part of the time by which passes or updates lasted too long."""
    update, end, answer = Updater.run, RhymeModule.on_train_batch_end, HostedWorkers.answer
    began: list[float] = []
    ends: list[float] = []
    late: list[float] = []  # seconds by which updates took too long
    tokens = 0

    def updated(updater: Updater, *given: Any, **named: Any) -> Any:
        until = time.monotonic() + arguments.stretch * update_s * tokens
        found = update(updater, *given, **named)
        late.append(max(time.monotonic() - until, 0.0))
        time.sleep(max(until - time.monotonic(), 0.0))
        return found

    def answers(workers: HostedWorkers, work: Any) -> Iterator[Any]:
        nonlocal tokens
        if work.number is not None:
            tokens = 0
            began.append(time.monotonic())
        for completion in answer(workers, work):
            tokens += len(completion.output)
            yield completion

    def on_train_batch_end(module: RhymeModule, *rest: Any) -> None:
        ends.append(time.monotonic())
        end(module, *rest)

    backend = [
        "backend._target_=stretched.StretchedWorkers",
        f"backend.emulate={headline.device(arguments.emulate)}",
        f"backend.stretch={arguments.stretch}",
        f"backend.lengths={arguments.lengths}",
        f"backend.weights_s={arguments.weights / arguments.lengths}",
        f"backend.max_running={arguments.max_running}",
        f"workers={arguments.workers}",
        "deterministic=false",
    ]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        stack.enter_context(patch.object(Updater, "run", updated))
        stack.enter_context(patch.object(RhymeModule, "on_train_batch_end", on_train_batch_end))
        stack.enter_context(patch.object(HostedWorkers, "answer", answers))
        settings = [*headline.settings_of(row, arguments, steps=arguments.steps), *backend]
        fit(compose(headline.config_in(folder), [*settings, f"run_dir={Path(folder) / 'run'}"]))
    whole = ends[-1] - began[0]
    return whole / arguments.stretch, max(StretchedWorkers.running.overrun_frac, sum(late[1:]) / whole)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("--emulate", default="h100_8b", help="name of a file in benchmarks/emulated/, or a path")
    parser.add_argument("--stretch", type=float, default=8.0)
    parser.add_argument("--overrun", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", nargs="*", help="names of rows")
    parser.add_argument("--prompts", type=int, default=16, help="a step")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads or 1)
    start = record.environment()
    costs = f"budget.costs={headline.device(arguments.emulate)}"
    sizes = {"policy": "long_sum", "max_running": 32, "epoch_steps": 4, "held_out": 8}
    given = Namespace(**{**vars(arguments), **sizes, "lengths": 32.0, "weights": 0.6})
    given.settings = [costs, *arguments.settings]
    sys.modules.setdefault("stretched", sys.modules[__name__])
    before = headline.run_row(headline.BARRIER, given, update_s=0.0, steps=2)
    update_s = 0.12 / 0.88 * sum(before.rollouts) / sum(map(sum, before.lengths))
    rows = []
    for row in [each for each in ROWS if arguments.rows is None or each.name in arguments.rows]:
        virtual = headline.run_row(row, given, update_s=update_s, steps=arguments.steps, cpu=1 / arguments.stretch)
        seconds, overrun = run(row, given, update_s=update_s)
        if overrun > arguments.overrun:
            raise SystemExit(
                f"{row.name}: {overrun:.1%} of the time was too much for this machine; expected a higher --stretch"
            )
        rows.append(
            {
                "row": row.name,
                "stretched_s": round(seconds, 2),
                "virtual_s": round(virtual.seconds, 2),
                "virtual_over_stretched": round(virtual.seconds / seconds, 3),
                "overrun_frac": round(overrun, 4),
            }
        )
        record.note_row(rows[-1])
        print(record.cell(rows[-1]), file=sys.stderr, flush=True)
    return record.finish("stretched", __doc__, arguments, rows=rows, start=start)


if __name__ == "__main__":
    main()
