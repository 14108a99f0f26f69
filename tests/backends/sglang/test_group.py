"""A group for weights whose other side refuses, dies or hangs: the engine's words, at once, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed.distributed_c10d import _world

from rhymerl.backends.remote import weight_group as group
from rhymerl.backends.remote.client import NoAnswerError
from rhymerl.backends.remote.weight_group import WeightGroup
from rhymerl.errors import BackendError
from tests.backends.sglang.weights_engine import weights_engine

NAMED = [("a", torch.ones(300, 1000)), ("b", torch.arange(5.0))]  # more than a connection buffers
NEVER_S = 1e5  # what is not told at once would be told only then
INIT, UPDATE = "/init_weights_update_group", "/update_weights_from_distributed"


@pytest.fixture(scope="module")
def two_engines():
    with weights_engine() as one, weights_engine() as two:
        yield one, two


@contextlib.contextmanager
def refused(engine, path):
    engine.post("/refuse", {"path": path})
    try:
        yield
    finally:
        engine.post("/refuse", {"path": None})


@pytest.fixture(autouse=True)
def nobody_gives_up_early(monkeypatch):
    monkeypatch.setattr(group, "_JOIN_S", NEVER_S)


def joined(engine):
    return WeightGroup(engine.another(timeout_s=NEVER_S), ranks=1, device=torch.device("cpu"))


def assert_nothing_is_left():
    assert not _world.pg_map
    assert not _world.pg_names
    deadline = time.monotonic() + 60
    while left := [each.name for each in threading.enumerate() if each.name.startswith("rhymerl")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def assert_works(engine):
    with contextlib.closing(joined(engine)) as weights:
        weights.send(NAMED, torch.float32, version=7)
    assert engine.get("/sums") == {"a": 300_000.0, "b": 10.0}
    assert_nothing_is_left()


@pytest.mark.slow
def test_several_are_joined_at_once(two_engines):
    """As the threads do that speak with a server each."""
    before = dict(os.environ)
    with ThreadPoolExecutor(2) as threads:
        for _ in range(4):
            groups = list(threads.map(joined, two_engines))
            for each in groups:
                each.send(NAMED, torch.float32, version=7)
                each.close()
    assert dict(os.environ) == before
    assert_nothing_is_left()


def test_groups_of_nccl_leave_the_environment_as_it_was(monkeypatch):
    """Whatever the order in which threads make them."""
    monkeypatch.setenv(group._ERRORS, "1")
    seen = []

    def enter():
        with group._told_of_errors():
            time.sleep(0.02)
            seen.append(os.environ[group._ERRORS])

    with ThreadPoolExecutor(3) as threads:
        for each in [threads.submit(enter) for _ in range(3)]:
            each.result()
    assert seen == ["2"] * 3
    assert os.environ[group._ERRORS] == "1"


def test_one_that_does_not_join_is_told_at_once(two_engines):
    engine, _ = two_engines
    with refused(engine, INIT), pytest.raises(BackendError, match=rf"refused {INIT} .*not with me"):
        joined(engine)
    assert_nothing_is_left()
    assert_works(engine)


def test_one_that_takes_no_weights_is_told_at_once(two_engines):
    engine, _ = two_engines
    weights = joined(engine)
    with refused(engine, UPDATE), pytest.raises(BackendError, match=rf"refused {UPDATE} .*not with me"):
        weights.send(NAMED, torch.float32, version=1)
    assert_nothing_is_left()
    weights.close()
    assert_works(engine)


@pytest.mark.parametrize("path", [INIT, UPDATE])
def test_one_that_dies_is_told_at_once(path):
    with weights_engine() as engine:
        weights = joined(engine) if path == UPDATE else None
        engine.post("/strike", {"path": path, "signal": "SIGKILL"})
        with pytest.raises(NoAnswerError, match=f"did not answer {path}"):
            (weights or joined(engine)).send(NAMED, torch.float32, version=1)
    assert_nothing_is_left()


@contextlib.contextmanager
def hanging_engine():
    """It stops where it is to take weights."""
    with weights_engine() as engine:
        pid = engine.get("/pid")
        engine.post("/strike", {"path": UPDATE, "signal": "SIGSTOP"})
        try:
            yield engine
        finally:
            os.kill(pid, signal.SIGCONT)


def test_one_that_hangs_is_told_in_our_words(monkeypatch):
    monkeypatch.setattr(group, "_JOIN_S", 2.0)
    monkeypatch.setattr(group, "_PARTING_S", 0.5)
    with hanging_engine() as engine:
        weights = joined(engine)
        with pytest.raises(NoAnswerError, match=r"^backend\.weights='distributed': .*[Tt]ime(d |)out"):
            weights.send(NAMED, torch.float32, version=1)
    assert_nothing_is_left()


INTERRUPTED = """
import os, signal, sys, threading, torch
from rhymerl.backends.remote import weight_group as group
from rhymerl.backends.remote.client import Client

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it, as shells do in the background
group._PARTING_S = 3.0
weights = group.WeightGroup(Client.at(sys.argv[1]), ranks=1, device=torch.device("cpu"))
threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    weights.send([("a", torch.ones(300, 1000))], torch.float32, version=1)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.slow
def test_an_interrupted_trainer_does_not_wait_for_one_that_hangs():
    with hanging_engine() as engine:
        command = [sys.executable, "-c", INTERRUPTED, engine.url]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout == "interrupted\n"


KILLED = """
import os, sys, torch
from rhymerl.backends.remote.client import Client
from rhymerl.backends.remote.weight_group import WeightGroup

WeightGroup(Client.at(sys.argv[1]), ranks=1, device=torch.device("cpu"))
os._exit(0)
"""


def test_the_group_of_a_trainer_that_was_killed_is_not_in_the_way_of_the_next(two_engines):
    subprocess.run([sys.executable, "-c", KILLED, two_engines[0].url], timeout=300, check=True)
    assert_works(two_engines[0])


def test_the_trainers_variables_are_as_before(two_engines, monkeypatch):
    monkeypatch.setenv(group._ERRORS, "1")
    joined(two_engines[0]).close()
    assert os.environ[group._ERRORS] == "1"
