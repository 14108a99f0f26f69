"""An emulated device: passes take its time, and nothing else changes."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.emulation import device as emulation
from benchmarks.emulation import virtual
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.costs import CostCurve
from rhymerl.drafters import NoDrafter
from rhymerl.drafts import Draft, DraftBatch
from rhymerl.engine.kv_store import KVStore
from rhymerl.engine.layout import lay_out_pass
from rhymerl.engine.rows import Rows
from rhymerl.testing import make_requests, tiny_policy
from rhymerl.workers.messages import Submit, Weights
from rhymerl.workers.versions import Versions

ROOT = Path(__file__).parents[2]


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"costs": [[1, 0.02], [100, 0.03]], "context_s_per_token": 0.0}))
    return path


class Clock:
    """Goes on while somebody sleeps, and by `look_s` with each look at it."""

    def __init__(self, look_s: float = 0.0) -> None:
        self.now_s, self.look_s = 0.0, look_s

    def perf_counter(self) -> float:
        self.now_s += self.look_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def answered(backend: EmbeddedBackend) -> tuple[list[list[int]], dict[str, float]]:
    with backend:
        backend.start(tiny_policy(), NoDrafter())
        requests = make_requests(4, max_tokens=12, stop_token_ids=())
        backend.submit(requests)
        found = []
        while len(found) < len(requests):
            found += backend.collect()
        metrics = dict(backend.metrics())
    tokens = {each.request.id: each.token_ids.tolist() for each in found}
    return [tokens[request.id] for request in requests], metrics


def test_tokens_are_the_same_and_passes_take_the_devices_time(costs, monkeypatch):
    plain, metrics = answered(EmbeddedBackend())
    assert not any(name.startswith("emulated/") for name in metrics)
    clock = Clock()
    monkeypatch.setattr(emulation, "time", clock)
    emulated, metrics = answered(emulation.EmulatedBackend(emulate=str(costs)))
    assert emulated == plain
    num_passes = metrics["rollout/passes"]
    assert 0.02 * num_passes <= clock.now_s <= 0.03 * num_passes
    assert metrics["emulated/overrun_frac"] == 0


def test_a_real_pass_that_is_too_slow_is_told(costs, monkeypatch):
    monkeypatch.setattr(emulation, "time", Clock(look_s=1.0))
    _, metrics = answered(emulation.EmulatedBackend(emulate=str(costs)))
    assert 0.97 / 0.03 < metrics["emulated/overrun_frac"] < 0.98 / 0.02


def test_a_pass_waits_for_what_is_left_of_its_time(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(emulation, "time", clock)
    device = emulation.EmulatedDevice(curve=CostCurve([(1, 2.0), (2, 3.0)]))
    monkeypatch.setattr(emulation.EmulatedDevice, "seconds", lambda device, layout: 2.0)
    clock.now_s = 1.5  # so much of it has passed
    device.wait(0.0, SimpleNamespace())
    assert (clock.now_s, device.overrun_s, device.charged_s) == (2.0, 0.0, 2.0)
    device.wait(-3.0, SimpleNamespace())
    assert (clock.now_s, device.overrun_s, device.charged_s) == (2.0, 3.0, 4.0)


def test_costs_are_by_tokens_and_by_keys_which_a_draft_reads_once():
    rows = Rows(2, 2000, KVStore(1, 4000).pool)
    row = np.array([rows.enter_prefix(np.zeros(length, np.int32)).row for length in (401, 601)])
    rows.cached[row] = [400, 600]
    tree = Draft(token_ids=np.array([1, 2]), parents=np.array([-1, 0]))
    device = emulation.EmulatedDevice(curve=CostCurve([(1, 1.0), (11, 2.0)]), context_s_per_token=0.001, scale=2.0)
    layout = lay_out_pass(
        rows,
        row,
        np.ones(2, np.int64),
        np.arange(2),
        DraftBatch.pack([tree, Draft(token_ids=np.empty(0, np.int64), parents=np.empty(0, np.int64))]),
    )
    assert layout.num_tokens == 4
    assert device.seconds(layout) == pytest.approx(2 * (1.3 + 1.002))
    device.context_s_per_pair = 0.001
    assert device.seconds(layout) == pytest.approx(2 * (1.3 + 1.002 + 0.401 + 0.402 + 0.403 + 0.601))
    device.context_s_per_pair, device.widths = 0.0, (0, 4, 8)
    assert device.num_computed(layout) == 2 * (1 + 4)  # drafts of two and of no nodes
    assert device.seconds(layout) == pytest.approx(2 * (1.9 + 1.002))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "expected a JSON file"),
        ({"costs": [[1, 1]]}, "expected at least two"),
        ({"costs": [[1, 1], [2, 2]], "context_s_per_token": -1}, "context_s_per_token=-1.0: expected at least 0"),
        ({"costs": [[1, 1], [2, 2]], "context_s_per_pair": -1}, "context_s_per_pair=-1.0: expected at least 0"),
    ],
)
def test_a_bad_file_is_refused(content, words, tmp_path):
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"^emulate='{path}': .*{words}"):
        emulation.EmulatedBackend(emulate=str(path))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "emulated").glob("*.json")), ids=lambda path: path.stem)
def test_the_devices_of_benchmarks_can_be_read(path):
    device = emulation.EmulatedDevice.read(path, scale=1.0)
    assert 0.001 < device.curve.costs[0] < 0.1
    assert json.loads(path.read_text())["source"]


def test_a_worker_does_not_run_ahead_of_its_clock(costs):
    workers = virtual.VirtualWorkers(emulate=str(costs), max_running=4)
    policy = tiny_policy()
    workers.start(policy, NoDrafter())
    with closing(workers):
        connection = workers.connect(0, lockstep=True)
        connection.post(Weights(version=0, source=workers.publish(policy.model.named_parameters())))
        requests = make_requests(4, max_tokens=12, stop_token_ids=())
        connection.post(Submit(requests=requests, priority=0, versions=Versions(oldest=0, final=0)))
        num_ticks, finished = 50, []
        for exchange in range(1, 2000):
            finished += connection.step(num_ticks).result().finished
            if len(finished) == len(requests):
                break
            (device,) = workers.devices
            assert device.spent["passes"] <= exchange * num_ticks * virtual.TICK_S + 0.03, "of the last pass at most"
    assert len(finished) == len(requests)
    assert exchange > 4, "12 passes of 0.02 s or more are done"
