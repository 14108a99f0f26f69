"""What is known of a Ray cluster from outside: which one a run joins that names none, and how many workers fit."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.errors import BackendError, ConfigError
from rhymerl.workers.remote import cluster
from rhymerl.workers.remote.cluster import answers, places, started_here
from rhymerl.workers.remote.ray import _QUIET, RayBackend

GREETING = bytes([0, 0, 24, 4, 0, 0, 0, 0, 0])  # the header of a gRPC server's first frame


@contextmanager
def listening(greeting: bytes) -> Iterator[str]:
    """Yield the address of a server that greets whoever comes, and says nothing more."""

    def greet() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            connection.sendall(greeting)
            guests.append(connection)

    guests: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for guest in guests:
        guest.close()


def test_only_a_cluster_that_answers_is_joined(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert started_here() is None
    (tmp_path / "ray").mkdir()
    with listening(GREETING) as address:
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"{address}\n")
        assert started_here() == address
    assert started_here() is None


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_who_does_not_greet_as_ray_does_is_no_cluster(greeting, monkeypatch):
    monkeypatch.setattr(cluster, "_CONNECT_S", 0.2)
    with listening(greeting) as address:
        assert not answers(address)
        monkeypatch.setenv("RAY_USE_TLS", "1")  # nobody greets before the handshake
        assert answers(address)


def test_a_name_that_ray_knows_is_left_to_it():
    assert answers("auto")


NODES = [
    {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}},
    {"Alive": True, "Resources": {"CPU": 3.0, "GPU": 4.0}},
    {"Alive": True, "Resources": {"CPU": 64.0}},
    {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
]


@pytest.mark.parametrize(
    ("each", "room"),
    [
        ({"CPU": 1}, 8 + 3 + 64),
        ({"CPU": 1, "GPU": 1}, 2 + 3),
        ({"CPU": 4}, 2 + 0 + 16),
        ({"CPU": 1, "GPU": 3}, 0 + 1),
        ({"CPU": 1, "GPU": 5}, 0),
    ],
)
def test_a_worker_has_all_that_it_takes_on_one_node(each, room):
    assert places(NODES, each) == room


def test_a_worker_with_fewer_gpus_than_its_engine_takes_is_refused():
    backend = RayBackend(engine=SGLangBackend(tensor_parallel=4), gpus_per_worker=1)
    with pytest.raises(
        ConfigError, match=r"backend\.gpus_per_worker=1: an engine of .*tensor_parallel=4 .*expected at least 4"
    ):
        backend.check(100)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of this test's own on a machine that is part of no cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in {**_QUIET, "RAY_CLIENT_MODE": "0", "RAY_AUTH_MODE": "disabled"}.items():  # Ray sets them itself
        monkeypatch.setenv(name, value)
    return tmp_path


def assert_cannot_start(folder: Path, reason: str) -> None:
    backend = RayBackend()
    with pytest.raises(
        BackendError, match=rf"^backend=ray: Ray cannot start a cluster here \({reason}\); expected "
    ) as told:
        backend.reserve(1)
    assert "\n" not in str(told.value)
    for remedy in ("TMPDIR", "memory", "backend.address"):
        assert remedy in str(told.value)
    assert backend._watcher is None
    assert not list(folder.glob("ray-*"))
    backend.close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Exception("The current node timed out\nduring startup.\n"), "The current node timed out during startup."),
        (ConnectionError("GCS is not there"), "GCS is not there"),
        (RuntimeError(), "RuntimeError"),
    ],
    ids=["Exception", "ConnectionError", "RuntimeError"],
)
def test_a_cluster_that_ray_cannot_start_is_one_line_and_leaves_nothing(error, reason, alone, monkeypatch):
    ray = pytest.importorskip("ray")

    def fails(*, _temp_dir: str, **_: object) -> None:
        assert Path(_temp_dir).parent == alone
        raise error

    monkeypatch.setattr(ray, "init", fails)
    assert_cannot_start(alone, reason)


def test_ray_itself_tells_that_a_folder_has_too_long_a_name(alone, monkeypatch):
    pytest.importorskip("ray")
    folder = alone / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert_cannot_start(folder, r".*path length cannot exceed 107 bytes.*")


def test_a_cluster_that_cannot_be_joined_is_one_line(alone, monkeypatch):
    ray = pytest.importorskip("ray")

    def fails(**_: object) -> None:
        raise RuntimeError("Version mismatch:\n  Ray: 2.9.0")

    monkeypatch.setattr(ray, "init", fails)
    with pytest.raises(
        BackendError, match=r"^backend=ray: Ray cannot join the cluster at auto \(Version mismatch: Ray: 2\.9\.0\)$"
    ):
        RayBackend(address="auto").reserve(1)
