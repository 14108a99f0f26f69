"""What is known of a Ray cluster from outside: which one a run joins that names none, and how many workers fit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.errors import ConfigError
from rhymerl.workers.remote import cluster
from rhymerl.workers.remote.cluster import answers, places, started_here
from rhymerl.workers.remote.ray import RayBackend

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
