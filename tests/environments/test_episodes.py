"""Episodes on a host: the reply joins the answer, and nothing is lost or doubled wherever the episode goes on."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

import numpy as np
import pytest

from rhymerl.drafts import NOT_DRAFTED
from rhymerl.environments.episodes import Episodes, _unsampled
from rhymerl.environments.pool import EnvironmentPool
from rhymerl.replayed import KeptSets
from rhymerl.types import Output, Prompt, RolloutRequest, SamplingParams
from rhymerl.workers.host import Host
from rhymerl.workers.versions import Versions
from tests.environments.worlds import Asks, Counts, Ponders
from tests.rollout.tokens import TokenBackend, token

STEP = Versions(oldest=0, final=0)


class Digits:
    """Encodes text as the codes of its characters."""

    def encode(self, content: str, *, is_chat: bool, ended_by: int, location: str):
        return content, np.array([ord(each) for each in content], np.int32)


class Turns(TokenBackend):
    """Each turn has `turn` tokens, unless a limit comes first."""

    def __init__(self, turn: int = 3, **settings) -> None:
        super().__init__(lambda request: min(self.end(request), request.sampling.max_tokens), **settings)
        self.turn = turn

    def end(self, request: RolloutRequest) -> int:
        turns = request.output.turns if request.output else ()
        return (turns[-1].stop if turns else 0) + self.turn

    def _leave(self, name, reason):
        request = self.answers[name][0]
        is_cut = reason == "stop" and self.end(request) > request.sampling.max_tokens
        return super()._leave(name, "length" if is_cut else reason)


class Staying(Turns):
    """Counts the calls of `collect` in each context that is entered for them."""

    def __init__(self) -> None:
        super().__init__()
        self.collects: list[int] = []

    @contextmanager
    def ready(self):
        self.collects.append(0)
        yield

    def collect(self, *limits, **more):
        self.collects[-1] += 1
        return super().collect(*limits, **more)


@contextmanager
def episodes(environment=None, *, timeout_s: float = 60.0, **settings) -> Iterator[Episodes]:
    parts = {"decode": lambda ids: "".join(chr(48 + each % 10) for each in ids), "context_tokens": 100}
    pool = EnvironmentPool(environment or Counts(), num_processes=1, timeout_s=timeout_s)
    made = Episodes(pool, Digits(), **{**parts, **settings})
    try:
        yield made
    finally:
        made.close()


def requests(count: int, *, max_tokens: int = 50, **columns) -> list[RolloutRequest]:
    prompt = Prompt(id="p", key="p", token_ids=[1], text="1", columns=columns)
    sampling = SamplingParams(max_tokens=max_tokens)
    return [
        RolloutRequest(id=f"0/p/{n}", prompt=prompt, sample=n, seed=17 * n, step=0, sampling=sampling)
        for n in range(count)
    ]


def answers(host: Host, asked: list[RolloutRequest]) -> dict[str, Output]:
    host.submit(asked, priority=0, versions=STEP)
    return finished(host, len(asked))


def finished(host: Host, count: int) -> dict[str, Output]:
    found: dict[str, Output] = {}
    while len(found) < count:
        host.decode()
        for each in host.finished:
            assert each.request.id not in found, "twice"
            found[each.request.id] = each.output
        host.finished.clear()
    assert not host.is_busy
    return found


def test_a_reply_stands_between_turns_and_is_not_sampled():
    with episodes() as made:
        output = answers(Host(Turns(), version=0, episodes=made), requests(1))["0/p/0"]
    assert output.finish_reason == "stop"
    first = "".join(chr(48 + token(0, index, 0) % 10) for index in range(3))
    reply = f"{sum(map(ord, first)) % 10}="
    assert output.token_ids[3:5].tolist() == [ord(each) for each in reply]
    assert [(each.start, each.stop, each.reward) for each in output.turns] == [(3, 5, 0.5), (8, 10, 0.5), (13, 13, 1.0)]
    assert output.turns[0].reply == reply
    assert output.sampled.tolist() == [True] * 3 + [False] * 2 + [True] * 3 + [False] * 2 + [True] * 3
    assert output.num_sampled == 9
    at = np.flatnonzero(output.sampled)
    assert output.token_ids[at].tolist() == [token(0, index, 0) for index in at], (
        "noise goes by the place in the answer"
    )


@pytest.mark.parametrize(
    ("limits", "max_tokens", "reason", "sampled"),
    [
        ({"max_turns": 2}, 50, "max_turns", 6),
        ({"max_turns": 3}, 50, "stop", 9),
        ({}, 6, "length", 6),
        ({}, 5, "length", 5),
        ({"max_turn_tokens": 2}, 50, "length", 2),
        ({"context_tokens": 6}, 50, "context", 3),
        ({"context_tokens": 7}, 50, "context", 4),
        ({"context_tokens": 10}, 50, "context", 6),
    ],
)
def test_limits_end_an_episode_by_their_names(limits, max_tokens, reason, sampled):
    with episodes(**limits) as made:
        output = answers(Host(Turns(), version=0, episodes=made), requests(1, max_tokens=max_tokens))["0/p/0"]
    assert (output.finish_reason, output.num_sampled) == (reason, sampled)
    assert len(output) < limits.get("context_tokens", 100)
    assert output.is_cut == (reason != "stop")


def test_the_engine_is_not_left_between_the_turns_of_an_episode():
    with episodes() as made:
        engine = Staying()
        answers(Host(engine, version=0, episodes=made), requests(1))
    assert engine.collects == [3]


def test_a_host_knows_how_many_wait():
    assert Host(Turns(), version=0).num_waiting == 0
    with episodes(Ponders()) as made:
        host = Host(Turns(max_running=2), version=0, episodes=made)
        host.submit(requests(3), priority=0, versions=STEP)
        counts = set()
        while len(host.finished) < 3:
            host.decode(max_passes=1)
            counts.add(host.num_waiting)
    assert {0, 3} <= counts


def test_an_environment_that_fails_ends_its_episode(caplog):
    with episodes(Asks()) as made:
        output = answers(Host(Turns(), version=0, episodes=made), requests(2, do="raise"))["0/p/1"]
    assert (output.finish_reason, output.num_sampled) == ("environment", 3)
    assert caplog.text.count("KeyError") == 1, "the first is said, the others are counted"


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 5))])
def test_withdrawn_anywhere_an_episode_goes_on_elsewhere_with_the_same_tokens(seed):
    asked, draw = requests(8), random.Random(seed)
    limits = {"max_turn_tokens": 3} if seed % 2 else {}
    with episodes(**limits) as made:
        whole = answers(Host(Turns(), version=0, episodes=made), asked)
    moved: dict[str, Output] = {}
    with episodes(**limits) as one, episodes(**limits) as other:
        hosts = [Host(Turns(), version=0, episodes=made) for made in (one, other)]
        hosts[0].submit(asked, priority=0, versions=STEP)
        reasons = set()
        while len(moved) < len(asked):
            for host in draw.sample(hosts, 2):
                host.decode(timeout_s=0.01, max_passes=draw.randint(1, 2))
                for each in host.finished:
                    assert each.request.id not in moved
                    moved[each.request.id] = each.output
                host.finished.clear()
            here, there = draw.sample(hosts, 2)
            here.withdraw([each.id for each in asked if draw.random() < 0.5])
            released, here.released = here.released, []
            reasons |= {each.output.finish_reason for each in released}
            there.submit([each.resume() for each in released], priority=0, versions=STEP)
    assert reasons == {"withdrawn", "turn"}
    for name, output in whole.items():
        assert moved[name].token_ids.tolist() == output.token_ids.tolist()
        assert moved[name].sampled.tolist() == output.sampled.tolist()
        assert [each.reply for each in moved[name].turns] == [each.reply for each in output.turns]
        assert moved[name].finish_reason == output.finish_reason


def test_under_a_new_policy_an_episode_begins_again_along_its_tokens():
    with episodes() as made:
        host = Host(Turns(), version=0, episodes=made)
        host.submit(requests(3), priority=0, versions=Versions(oldest=0, final=1))
        while host.is_busy:
            host.decode()
        assert not host.finished, "drafts wait for their policy"
        host.renew(1, lambda: renewed(host))
        found = finished(host, 3)
    for name, output in found.items():
        assert (output.policy_versions == 1).all()
        assert len(output.turns) == 3
        seed = 17 * int(name[-1])
        at = np.flatnonzero(output.sampled)
        assert output.token_ids[at].tolist() == [token(seed, index, 1) for index in at]


def renewed(host: Host) -> TokenBackend:
    host.backend.sync_weights((), 1)
    return host.backend


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_host_says_how_long_it_had_nothing_to_decode_because_of_environments(lockstep):
    with episodes(Ponders(), lockstep=lockstep) as made:
        host = Host(Turns(pass_s=0.002), version=0, episodes=made)
        answers(host, requests(1))  # starts the process
        host.spans.take()
        host.metrics()
        began = time.time()
        output = answers(host, requests(2))["0/p/1"]
        seconds = time.time() - began
        spans = [each for each in host.spans.take() if each.activity == "environment"]
        idle = host.metrics()["environment/idle_frac"]
    assert {each.number for each in spans} == {0}
    waited_s = sum(each.seconds for each in spans)
    assert 0.1 < waited_s <= seconds
    assert waited_s / seconds == pytest.approx(float(idle), abs=0.15)
    times = [at for turn in output.turns for at in (turn.replied_at - turn.waited_s, turn.replied_at)]
    assert [began, *times, began + seconds] == sorted([began, *times, began + seconds])
    assert "environment/idle_frac" not in Host(Turns(), version=0).metrics()


def test_a_reply_is_in_every_column_of_an_answer():
    kept = KeptSets.of([np.arange(2, dtype=np.int32), np.empty(0, np.int32)], [-0.5, 0.0])
    output, tokens = Output.of([4, 5], logprob=-1.0, policy_version=3), np.array([6, 7, 8], np.int32)
    of_five = np.array([-0.5, 0.0, 0.0, 0.0, 0.0])
    for each in (output, replace(output, kept=kept, sources=np.zeros(2, np.int8))):
        wanted = replace(
            each,
            token_ids=np.array([4, 5, 6, 7, 8], np.int32),
            logprobs=np.array([-1.0, -1.0, 0.0, 0.0, 0.0]),
            policy_versions=np.full(5, 3, np.int32),
            sources=None if each.sources is None else np.array([0, 0, *[NOT_DRAFTED] * 3], np.int8),
            kept=None if each.kept is None else replace(kept, counts=np.array([2, 0, 0, 0, 0]), log_masses=of_five),
        )
        np.testing.assert_equal(asdict(each + _unsampled(each, tokens)), asdict(wanted))
