"""The things that an engine removes when its trainer was killed: the session's own folders, and nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rhymerl.backends.sglang.plugin.serve import left_behind
from tests.backends.sglang.test_server import ENVIRONMENT, HOME, PATH, gone

TRAINER = """
import sys
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.testing import tiny_policy

policy = tiny_policy(dtype="float32", hidden_size=8, num_layers=1)
backend = SGLangBackend(environment={"PYTHONPATH": sys.argv[1]}, folder=sys.argv[2] or None)
backend.start(policy, HistoryTreeDrafter())
(backend.weights_folder / "model.safetensors").write_bytes(b"as while they are handed over")
print(backend.own_folder, backend.weights_folder, sep="\\n", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("where", [pytest.param("temporary", marks=pytest.mark.slow), "given"])
def test_a_killed_trainer_leaves_no_files(tmp_path, where):
    given = tmp_path / "given"
    given.mkdir()
    (given / "mine.txt").write_text("the user's")
    words = [sys.executable, "-c", TRAINER, ENVIRONMENT["PYTHONPATH"], str(given) if where == "given" else ""]
    path = os.pathsep.join(map(str, (PATH, HOME)))  # where SGLang seems to be installed
    variables = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables) as trainer:
        folders = [Path(trainer.stdout.readline().decode().strip()) for _ in range(2)]
        assert all(folder.is_dir() for folder in folders)
        engine = int(re.search(r"child (\d+)", (folders[0] / "engine.log").read_text())[1])
        trainer.send_signal(signal.SIGKILL)
    assert gone(engine)
    deadline = time.monotonic() + 100
    while any(folder.exists() for folder in folders) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(folder.exists() for folder in folders)
    assert [each.name for each in given.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("settings", "weights", "removed"),
    [
        ("/temporary/rhymerl-sglang-a/engine.json", "/shared/rhymerl-sglang-a", ["/temporary/rhymerl-sglang-a", "/shared/rhymerl-sglang-a"]),
        ("/temporary/rhymerl-sglang-a/engine.json", "/shared/rhymerl-sglang-a-b", ["/temporary/rhymerl-sglang-a", "/shared/rhymerl-sglang-a-b"]),
        ("/temporary/rhymerl-sglang-a/engine.json", "/shared/rhymerl-sglang-ab", ["/temporary/rhymerl-sglang-a"]),
        ("/mine/rhymerl-sglang-a/engine.json", "/mine/rhymerl-sglang-a/weights", ["/mine/rhymerl-sglang-a"]),
        ("/temporary/rhymerl-sglang-a/engine.json", "/models/mine", ["/temporary/rhymerl-sglang-a"]),
        ("/temporary/rhymerl-sglang-a/engine.json", "/shared/rhymerl-sglang-b", ["/temporary/rhymerl-sglang-a"]),
        ("/served/engine.json", "/shared/rhymerl-sglang-a", []),
        ("/served/engine.json", "/shared/served", []),
        ("engine.json", "", []),
        ("", "", []),
    ],
)  # fmt: skip
def test_only_what_has_the_sessions_own_name_is_removed(settings, weights, removed):
    assert left_behind(["--port", "1", "--model-path", weights, "--dtype", "float32"], settings) == removed
    assert left_behind(["--port", "1"], settings) == removed[:1]
