"""What cannot be is refused in one line, before anybody waits for it."""

from __future__ import annotations

import pytest

from tests.ray.commands import SETTINGS, start


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["workers=0"], "workers=0: expected at least 1"),
        (
            ["backend.engine=vllm"],
            "backend.engine='vllm': expected embedded, sglang, or the settings of such a backend",
        ),
        (["backend.cpus_per_worker=0"], "backend.cpus_per_worker=0: expected at least 1"),
        (
            ["backend=embedded", "workers=3", "run_ahead='off'"],
            "workers=3: with EmbeddedBackend every rank is a worker; expected null, 1, or backend=ray",
        ),
        pytest.param(
            ["backend.address='127.0.0.1:9'"],
            "backend.address='127.0.0.1:9': no Ray cluster answers there",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["backend.gpus_per_worker=1"],
            "workers=2: each takes 1 CPU and 1 GPU of a node, and the cluster (2 CPU and 0 GPU on 1 node) has room for 0",
            marks=pytest.mark.ray,
        ),
    ],
)
def test_it_is_refused_in_one_line(settings, words, tmp_path, capfd, request):
    if request.node.get_closest_marker("ray") or any("address" in each for each in settings):
        process = start(tmp_path / "run", *settings)
        _, said = process.communicate(timeout=600)
        code = process.returncode
    else:
        from rhymerl.cli import main

        code = main([*SETTINGS, f"run_dir={tmp_path / 'run'}", *settings])
        said = capfd.readouterr().err
    assert code == 2
    assert said.splitlines()[-1].startswith(f"error: {words}")
