"""Servers that were started by hand, as `rhymerl sglang-args` says, two of them for one trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rhymerl.backends.remote.process import held_port
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.cli import main
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.testing import make_requests, tiny_policy
from tests.sglang.conftest import StockServer
from tests.sglang.engines import Answers, answered, embedded, equal, started
from tests.sglang.test_fit import on_sglang
from tests.sglang.test_life import moved

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("cpu_engine")]


@contextmanager
def served(line: str, log: Path):
    """The address of a server of that command line."""
    with held_port() as held:
        port = held.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {line} --host 127.0.0.1 --port {port}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PATH": f"{Path(os.sys.executable).parent}:{os.environ['PATH']}"},
        )
    try:
        server = StockServer(url=f"http://127.0.0.1:{port}")
        server.wait(process, log)
        yield server.url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_two_of_them(tmp_path, capsys):
    policy = tiny_policy(dtype="float32", context=512)
    policy.save(tmp_path / "model")
    lines = []
    for name in "ab":
        out = tmp_path / name
        words = [f"model.path={tmp_path / 'model'}", f"out={out}", "backend.max_running=16"]
        words += ["budget=fixed", "budget.nodes=7"]  # whether they pay or not
        assert main(["sglang-args", *words, *on_sglang()]) == 0
        lines.append(capsys.readouterr().out.strip().splitlines()[-1])
    assert all(word in lines[0] for word in ("--speculative-algorithm RHYMERL", "RHYMERL_SGLANG="))
    with ExitStack() as stack:
        urls = [stack.enter_context(served(line, tmp_path / f"{i}.log")) for i, line in enumerate(lines)]
        for weights in ("disk", "distributed"):
            backends = SGLangBackend(url=urls, weights=weights, max_running=16, nodes=7).servers()
            requests = make_requests(24, group_size=4, seed=6)
            answers: Answers = {}
            with ExitStack() as running:
                for backend in backends:
                    started(running.enter_context(backend), policy, HistoryTreeDrafter())
                moved(policy)
                for backend in backends:
                    backend.sync_weights(policy.model.named_parameters(), 1)
                for backend, mine in zip(backends, (requests[:12], requests[12:]), strict=True):
                    answers |= answered(backend, mine)
                metrics = [backend.metrics() for backend in backends]
            assert equal(answers, embedded(policy, requests)) >= 0.98
            assert all(each["rollout/spec_accept_length"] > 1.05 for each in metrics)  # drafted from siblings
            print(weights, json.dumps(metrics))
