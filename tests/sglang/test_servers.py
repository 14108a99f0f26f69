"""Servers that were started by hand, as `rhymerl sglang-args` says, two of them for one trainer."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from rhymerl.backends.remote.client import Client, RefusedError
from rhymerl.backends.remote.drafter_feed import FeedMessage
from rhymerl.backends.remote.process import held_port
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.cli import main
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.history import HistoryStore
from rhymerl.testing import make_requests, tiny_policy
from tests.sglang.conftest import StockServer
from tests.sglang.engines import (
    Answers,
    answered,
    embedded,
    equal,
    largest_difference,
    remember,
    started,
)
from tests.sglang.sources import accepted
from tests.sglang.test_fit import STEPS, on_sglang, one_thread, trained  # noqa: F401 - a fixture
from tests.sglang.test_life import moved

DRAFTS = ["budget=fixed", "budget.nodes=7"]  # whether they pay or not
OLDER = """
import runpy
from sglang.srt.plugins import load_plugins
from rhymerl.backends.sglang.plugin import route

if __name__ == "__main__":
    route.install = lambda folder: None
    load_plugins()
    runpy.run_module("sglang.launch_server", run_name="__main__")
"""

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


def line_of(out: Path, capsys, *words: str) -> str:
    """Return what `rhymerl sglang-args` prints for a server of the model in `model`, whose files are in `out`."""
    own = [f"model.path={out.parent / 'model'}", f"out={out}", "backend.max_running=16", *DRAFTS]
    assert main(["sglang-args", *own, *words, *on_sglang()]) == 0
    return capsys.readouterr().out.strip().splitlines()[-1]


def test_two_of_them(tmp_path, capsys):
    policy = tiny_policy(dtype="float32", context=512)
    policy.save(tmp_path / "model")
    lines = [line_of(tmp_path / name, capsys) for name in "ab"]
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


def of_a_run(urls: list[str]) -> list[str]:
    """Overrides for a run with these servers."""
    own = ["backend=sglang", f"backend.url=[{','.join(urls)}]", "backend.max_running=16", "backend.nodes=7"]
    return [*own, *DRAFTS, "deterministic=false"]


def same_run(ours, theirs) -> None:
    """Both have sampled the same tokens, and learned the same from them."""
    (weights, answers, _), (other_weights, other_answers, _) = ours, theirs
    pairs = zip(answers, other_answers, strict=True)
    assert all(np.array_equal(one.response_tokens, two.response_tokens) for one, two in pairs)
    assert max(float((weights[each] - other_weights[each]).abs().max()) for each in weights) < 1e-4


def lines_about_servers(caplog) -> list[str]:
    return [each.message for each in caplog.records if each.name == "rhymerl.backends.sglang.served"]


@pytest.mark.usefixtures("one_thread")
def test_drafts_come_from_the_trainers_history(tmp_path, capsys, caplog):
    """Each step is an epoch; a second trainer has its own history, so its first step knows no earlier answers."""
    tiny_policy(dtype="float32", context=128, peaked=2.0).save(tmp_path / "model")
    log = tmp_path / "sources"
    drafter = ["drafter=tests.sglang.sources.CountingDrafter", f"drafter.log={log}"]
    ours = trained(tmp_path, tmp_path / "model", "alone", "drafter=none", "deterministic=false")
    with ExitStack() as stack:
        lines = [line_of(tmp_path / name, capsys, *drafter) for name in "ab"]
        urls = [stack.enter_context(served(line, tmp_path / f"{i}.log")) for i, line in enumerate(lines)]
        for name in ("first", "second"):
            same_run(ours, trained(tmp_path, tmp_path / "model", name, *of_a_run(urls), *drafter))
            steps = [accepted(log)[str(step)] for step in range(STEPS)]
            print(name, *map(dict, steps))
            assert steps[0]["HISTORY"] == 0
            assert all(step["HISTORY"] > 20 for step in steps[1:])
    assert not any("not from this run's history" in line for line in lines_about_servers(caplog))


def test_a_server_with_an_older_plugin_is_told_of_and_used(tmp_path, capsys, caplog):
    policy = tiny_policy(dtype="float32", context=512)
    policy.save(tmp_path / "model")
    (tmp_path / "older.py").write_text(OLDER)
    line = line_of(tmp_path / "a", capsys).replace("-m sglang.launch_server", str(tmp_path / "older.py"))
    requests = make_requests(12, group_size=4, seed=3)
    ours, history = embedded(policy, requests), HistoryStore()
    remember(history, ours)
    with served(line, tmp_path / "log") as url, SGLangBackend(url=url, max_running=16, nodes=7) as backend:
        started(backend, policy, HistoryTreeDrafter())
        backend.follow(history)
        theirs = answered(backend, requests)
        metrics = backend.metrics()
    print(equal(theirs, ours), metrics)
    assert equal(theirs, ours) >= 0.98
    assert 1.05 < metrics["rollout/spec_accept_length"] < 2, "from siblings alone"
    (told,) = lines_about_servers(caplog)
    assert "not from this run's history, which it does not take" in told


def test_history_reaches_the_rank_that_drafts(tmp_path, capsys):
    """A server over two processes, of which the first one drafts."""
    policy = tiny_policy(dtype="float32", context=512)
    policy.save(tmp_path / "model")
    line = line_of(
        tmp_path / "a", capsys, "backend.tensor_parallel=2", "+backend.environment.SGLANG_CPU_OMP_THREADS_BIND='0|1'"
    )
    requests = make_requests(24, group_size=4, seed=3)
    ours, history = embedded(policy, requests), HistoryStore()
    remember(history, ours)
    with served(line, tmp_path / "log") as url:
        settings = {"max_running": 16, "nodes": 7, "tensor_parallel": 2}
        with SGLangBackend(url=url, **settings) as backend:
            started(backend, policy, HistoryTreeDrafter())
            backend.follow(history)
            theirs = answered(backend, requests)
            metrics = backend.metrics()
            with pytest.raises(RefusedError, match=r"HTTP 400.*history message: not a history file"):
                Client.at(url).post("/rhymerl/feed", pickle.dumps(FeedMessage()))
    print(equal(theirs, ours), largest_difference(theirs, ours), json.dumps(metrics))
    assert equal(theirs, ours) >= 0.98
    assert largest_difference(theirs, ours) < 1e-4
    assert metrics["rollout/spec_accept_length"] > 3
    assert metrics["spec/draft_hit_rate"] > 0.9
