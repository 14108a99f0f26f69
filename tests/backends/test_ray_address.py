"""Which Ray cluster a run joins that names none: the one of `ray start`, and not another run's."""

from __future__ import annotations

import socket

from rhymerl.backends.hosted.ray import _started_here


def test_only_a_cluster_that_answers_is_joined(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert _started_here() is None
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"{address}\n")
        assert _started_here() == address
    assert _started_here() is None
