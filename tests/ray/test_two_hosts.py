"""Two hosts: network namespaces of this machine with a link between them, which is cut for a while."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.commands import actors, answers, end, finish, furthest, one_process, processes, start, weights

pytestmark = pytest.mark.ray
HOSTS = {"rrl-one": "10.77.0.1", "rrl-two": "10.77.0.2"}
SETTINGS = ["trainer.max_steps=3", "rollout.max_tokens=96"]
CUT_S = 20.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Skips where namespaces may not be made."""
    try:
        ip("netns", "add", "rrl-one")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        ip("netns", "add", "rrl-two")
        ip("link", "add", "eth-one", "netns", "rrl-one", "type", "veth", "peer", "name", "eth-two", "netns", "rrl-two")
        for name, address in HOSTS.items():
            device = name.replace("rrl", "eth")
            ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ray(host: str, *words: str) -> None:
    command = [str(Path(sys.executable).parent / "ray"), "start", f"--node-ip-address={HOSTS[host]}", *words]
    subprocess.run(["ip", "netns", "exec", host, *command], check=True, capture_output=True, timeout=600)


def test_a_link_that_is_cut_costs_time_alone(hosts, tmp_path, temporary_folder, monkeypatch):
    one_process(tmp_path / "alone", *SETTINGS)
    run_dir = tmp_path / "run"
    monkeypatch.setenv("RUN_OF_TEST", str(run_dir))
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # as the head is, from Ray 2.60 on
    try:
        ray(
            "rrl-one",
            "--head",
            "--port=6399",
            "--num-cpus=1",
            f"--temp-dir={temporary_folder}",
            "--include-dashboard=false",
        )
        ray("rrl-two", f"--address={HOSTS['rrl-one']}:6399", "--num-cpus=1")
        process = start(
            run_dir,
            *SETTINGS,
            "workers=2",
            "run_ahead=draft",
            "backend.engine._target_=benchmarks.emulation.EmulatedBackend",
            "backend.engine.emulate=benchmarks/emulated/h100_8b.json",  # so that it lasts
            "backend.engine.emulate_scale=6",
            f"backend.address={HOSTS['rrl-one']}:6399",
            host="rrl-one",
        )
        while not list((run_dir / "checkpoints").glob("*.ckpt")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        assert len(actors(run_dir)) == 2
        ip("-n", "rrl-two", "link", "set", "eth-two", "down")
        time.sleep(CUT_S)
        assert process.poll() is None, "it has ended before the link was cut"
        ip("-n", "rrl-two", "link", "set", "eth-two", "up")
        finish(process, timeout_s=300)
    finally:
        end(processes(run_dir))
    assert answers(run_dir) == answers(tmp_path / "alone")
    assert furthest(weights(run_dir), weights(tmp_path / "alone")) < 1e-9
