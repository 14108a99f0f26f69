"""A cluster that grows and shrinks under a run: its workers come and go, and its tokens stay."""

from __future__ import annotations

import os
import time

import pytest

from tests.ray.commands import actors, answers, finish, furthest, one_process, start, weights

pytestmark = pytest.mark.ray
SETTINGS = ["trainer.max_steps=10", "rollout.max_tokens=96"]


@pytest.mark.parametrize("run_ahead", ["'off'", "draft"])
def test_workers_come_with_a_node_and_go_with_it(run_ahead, tmp_path, temporary_folder, monkeypatch):
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray sets it at its import
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    one_process(tmp_path / "alone", *SETTINGS)
    run_dir = tmp_path / "run"
    monkeypatch.setenv("RUN_OF_TEST", str(run_dir))  # of the nodes' processes too
    monkeypatch.setenv("RAY_TMPDIR", str(temporary_folder))
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        process = start(
            run_dir,
            *SETTINGS,
            "workers=3",
            "backend.min_workers=1",
            "backend.engine._target_=benchmarks.emulation.EmulatedBackend",
            "backend.engine.emulate=benchmarks/emulated/h100_8b.json",  # so that it lasts
            "backend.engine.emulate_scale=6",
            f"run_ahead={run_ahead}",
            f"backend.address={cluster.address}",
        )
        wait(process, lambda: list((run_dir / "checkpoints").glob("*.ckpt")))
        assert len(actors(run_dir)) == 1
        node = cluster.add_node(num_cpus=2)
        wait(process, lambda: len(actors(run_dir)) == 3)
        time.sleep(3)
        assert process.poll() is None, "it has ended before its workers go"
        cluster.remove_node(node, allow_graceful=False)
        finish(process, timeout_s=300)
    finally:
        cluster.shutdown()
    assert answers(run_dir) == answers(tmp_path / "alone")
    assert furthest(weights(run_dir), weights(tmp_path / "alone")) < 1e-9


def wait(process, condition) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
