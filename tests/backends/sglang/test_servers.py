"""Servers that run already are workers: the scheduler fills each of them, and a lost one only costs time."""

from __future__ import annotations

import copy
import os
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.distributed.group import Group
from rhymerl.drafters import NoDrafter
from rhymerl.errors import BackendError, ConfigError
from rhymerl.models.sharding import shard
from rhymerl.rewards import Reward, RewardScorer
from rhymerl.rollout import RECORDS, RolloutLoop, RolloutSettings
from rhymerl.schedulers import FIFOScheduler, SortedScheduler
from rhymerl.testing import make_prompt
from rhymerl.training.checks import check_workers
from rhymerl.workers import backend_of_workers
from rhymerl.workers.remote.servers import PolicyCopies, ServersBackend
from tests.backends.sglang.conftest import make_flat_policy
from tests.backends.sglang.fake_engine import FakeEngine, answer_of
from tests.backends.sglang.test_session import soon
from tests.integration.ranked import run_ranks

PROMPTS = [make_prompt([3, 2 + number], id=str(number)) for number in range(6)]
SETTINGS = RolloutSettings(group_size=4, max_tokens=30)


@pytest.fixture
def engines():
    with ExitStack() as stack:
        yield [stack.enter_context(FakeEngine()) for _ in range(3)]


@contextmanager
def loop_over(
    engines,
    policy,
    *,
    scheduler=FIFOScheduler,
    piece_s=None,
    drafter=None,
    history_tokens: int | None = None,
    **settings,
):
    urls = [engine.url for engine in engines]
    backend = backend_of_workers(SGLangBackend(url=urls, max_running=4, piece_s=piece_s, history_tokens=history_tokens))
    assert isinstance(backend, ServersBackend)
    with backend:
        backend.start(policy, drafter or NoDrafter())
        loop = RolloutLoop(
            backend,
            scheduler(),
            scorer=RewardScorer([Reward(lambda completion: 0.0, name="none", where="main")]),
            decode=lambda ids: "",
            stop_token_ids=[1],
            **settings,
        )
        try:
            yield loop
        finally:
            loop.close()


def run(loop, policy, steps, *, update_s: float = 0.0):
    """Steps of training; every answer of every step is whole, and is there once."""
    for step in steps:
        loop.sync_weights(policy.named_weights(), step)
        samples = loop.run(PROMPTS, step, SETTINGS, following=PROMPTS, epoch=step).samples
        assert len(samples) == 24
        for sample in samples:
            assert sample.completion.token_ids.tolist() == answer_of(sample.completion.request)
        time.sleep(update_s)
        yield samples


def by_engine(engines):
    return [len(engine.inputs) for engine in engines]


@pytest.mark.parametrize("scheduler", [FIFOScheduler, SortedScheduler])
def test_the_scheduler_fills_each_server(engines, flat_policy, scheduler):
    with loop_over(engines, flat_policy, scheduler=scheduler) as loop:
        for _ in run(loop, flat_policy, range(3)):
            pass
    assert by_engine(engines) == [24, 24, 24]
    assert all(engine.version == "2" for engine in engines)


def test_all_of_them_read_one_file_of_weights(engines, flat_policy):
    with loop_over(engines, flat_policy) as loop:
        for _ in run(loop, flat_policy, range(3)):
            pass
        files = [found for engine in engines for found in engine.files]
        assert len(files) == 9
        assert len(set(files)) == 3, "one a version"
        folders = set.union(*(engine.folders for engine in engines))
        assert len(folders) == 3
        assert all([path.name for path in folder.iterdir()] == ["config.json"] for folder in folders), "all have had it"


def test_a_copy_of_a_sharded_policy_leaves_dtype_and_transport_to_the_policys_device(engines, flat_policy, monkeypatch):
    """On GPUs a server got float32 over gloo, as the copy in the host's memory would have it."""
    monkeypatch.setattr("rhymerl.workers.remote.servers.is_sharded", lambda model: True)
    trained = replace(flat_policy, model=copy.deepcopy(flat_policy.model).to("meta"))
    made = PolicyCopies(trained).of(0, dict(flat_policy.named_weights()))
    assert made.model.device.type == "cpu"
    assert made.device.type == "meta", "no other device than the CPU is here"
    found = []

    class Recorded:
        is_closed = False

        def __init__(self, fleet, *, ranks, device):
            found.append(device.type)

        def send(self, named, dtype, *, version):
            found.append(dtype)

        def close(self):
            pass

    monkeypatch.setattr("rhymerl.backends.remote.delivery.WeightGroup", Recorded)
    with SGLangBackend(url=engines[0].url, max_running=4, weights="distributed") as backend:
        backend.start(made, NoDrafter())
        backend.sync_weights(made.named_weights(), 0)
    assert found == ["meta", torch.bfloat16]


def test_they_go_on_while_the_policy_is_trained(engines, flat_policy):
    for engine in engines:
        engine.token_s = 0.001
    with loop_over(engines, flat_policy, run_ahead="keep") as loop:
        steps = list(run(loop, flat_policy, range(4), update_s=0.05))
    ages = {
        int(step - version)
        for step, samples in enumerate(steps)
        for each in samples
        for version in each.completion.output.policy_versions
    }
    assert ages == {0, 1}


def test_a_server_that_goes_is_missed_by_nobody_and_comes_back(engines, flat_policy):
    for engine in engines:
        engine.token_s = 0.002
    gone = engines[1]
    with loop_over(engines, flat_policy) as loop, ExitStack() as stack:
        steps = run(loop, flat_policy, range(20))
        next(steps)
        loop.workers.backend.start_timeout_s = 0.5
        gone.holds_at = 2  # so that it has requests when it goes
        pool = loop.workers
        held = iter(steps)

        threading.Thread(target=lambda: (soon(lambda: len(gone.inputs) > 8), gone.vanish())).start()
        next(held)
        assert pool.num_lost >= 1
        time.sleep(1.0)  # longer than a worker may take to come up
        next(held)
        fresh = stack.enter_context(FakeEngine(port=urlsplit(gone.url).port))
        soon(lambda: pool.handles[1].is_up)
        next(held)
        assert len(fresh.inputs) > 0


def test_a_run_without_any_server_ends(engines, flat_policy):
    with loop_over(engines, flat_policy) as loop:
        steps = run(loop, flat_policy, range(3))
        next(steps)
        loop.workers.backend.start_timeout_s = 0.5
        for engine in engines:
            engine.vanish()
        with pytest.raises(BackendError, match=r"has not come up within backend.start_timeout_s=0.5"):
            next(steps)


def test_there_are_as_many_workers_as_servers(engines, flat_policy):
    words = "workers=2: every server of backend.url is a worker; expected 3, or null"
    with pytest.raises(ConfigError, match=words), loop_over(engines, flat_policy, num_workers=2):
        pass


def test_a_server_that_is_not_there_is_told_at_once(engines, flat_policy):
    engines[2].vanish()
    with pytest.raises(BackendError, match=r"did not answer"), loop_over(engines, flat_policy):
        pass


def test_servers_cannot_keep_step():
    backend = backend_of_workers(SGLangBackend(url="http://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="deterministic=true: workers of ServersBackend cannot count passes"):
        check_workers(backend, FIFOScheduler(), workers=None, num_ranks=1, run_ahead="off", lockstep=True)


class Address(NamedTuple):
    """Of an engine in another process."""

    url: str


def sharded_steps(urls: list[str]) -> None:
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    policy, ranks = make_flat_policy(), Group(RECORDS)
    shard(policy.model, init_device_mesh("cpu", (2,)))
    with loop_over([Address(url) for url in urls], policy, ranks=ranks) as loop:
        for _ in run(loop, policy, range(3)):
            pass
        if ranks.rank == 0:
            connections = [handle.connection for handle in loop.workers.handles]
            compared = {id(each._host._load.engine.policy) for each in connections}
            assert len(compared) == 1, "one copy is enough for all"
    ranks.close()
    dist.destroy_process_group()


def test_servers_get_the_weights_of_a_policy_that_ranks_have_in_parts(engines, tmp_path):
    """Rank 0 alone speaks with the servers, and compares each of them with the policy when it connects."""
    run_ranks(2, sharded_steps, [each.url for each in engines], output=tmp_path / "output", timeout_s=60)
    assert by_engine(engines) == [24, 24, 24]
    assert all(engine.version == "2" for engine in engines)
