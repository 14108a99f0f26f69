"""A rank's step, to which requests of others come late."""

from __future__ import annotations

import collections
import time

import pytest

from rhymerl.distributed import Alone
from rhymerl.errors import BackendError
from rhymerl.rollout import requests_of
from rhymerl.schedulers import FIFOScheduler
from rhymerl.workers import StepRequests
from rhymerl.workers.coordinator import Command, SharedPlan, make_plan
from rhymerl.workers.host import Host
from rhymerl.workers.ranks import RankStep, RankWorkers
from rhymerl.workers.step_in_flight import StepInFlight
from rhymerl.workers.versions import Versions
from tests.rollout.ranked import PROMPTS, SETTINGS, length
from tests.rollout.tokens import TokenBackend, token

REQUESTS = requests_of(PROMPTS[:4], 0, SETTINGS, seed=0, stop_token_ids=())
FOLLOWING = requests_of(PROMPTS[:2], 1, SETTINGS, seed=0, stop_token_ids=())


def step_of(host: Host, work: StepRequests) -> RankStep:
    """A step in which prefetched answers are kept; this rank's queue of it is given by hand."""
    plan = SharedPlan(queues=[], digest="")
    step = StepInFlight(work=work, plan=plan, versions=Versions.of(0, "keep"))
    return RankStep(host, step, next_versions=Versions.of(1, "keep"))


class Rank:
    """A rank by itself, which does so many passes at a time."""

    def __init__(self, backend: TokenBackend, queue, *, passes: int) -> None:
        self.host, self.passes = Host(backend, version=0), passes
        self.step = step_of(self.host, StepRequests(step=0, requests=REQUESTS, following=FOLLOWING))
        self.step.go_on(queue)

    def decode(self):
        self.host.decode(max_passes=self.passes)
        return self.step.take()

    def run_ahead(self) -> None:
        plan = make_plan(FIFOScheduler(), FOLLOWING, num_workers=1, step=1)
        self.step.follow(Command(moves={}, plan=plan))

    def ahead(self):
        return self.step.end().outputs


def hand_over(giver: Rank, taker: Rank, index: int) -> None:
    giver.step.follow(Command(moves={index: 1}))
    taker.step.receive([message.value for message in giver.step.messages()])


@pytest.mark.parametrize("comes_late", [False, True])
def test_one_that_comes_after_the_plan_leaves_the_following_step_to_be_begun(comes_late):
    giver, taker = (Rank(TokenBackend(length), REQUESTS[6 * i : 6 * i + 6], passes=4) for i in range(2))
    giver.decode()
    taker.decode()
    taker.run_ahead()
    if comes_late:
        hand_over(giver, taker, 5)
    ended = [completion.request.id for _ in range(100) for completion in taker.decode()]
    assert len(ended) == 6 + comes_late
    assert len(taker.ahead()) == len(FOLLOWING)


def test_what_has_begun_of_the_following_step_is_there_for_it():
    rank = Rank(TokenBackend(length, max_running=len(FOLLOWING)), [], passes=1)
    rank.run_ahead()
    rank.decode()
    assert {name: len(output) for name, output in rank.ahead().items()} == {each.id: 1 for each in FOLLOWING}


class Late(TokenBackend):
    """A backend like an engine in another process: what has nearly ended does so while it is withdrawn."""

    def withdraw(self, ids=None):
        for request, tokens, versions in self.answers.values():
            while length(request) - 2 <= len(tokens) < length(request):
                tokens.append(token(request.seed, len(tokens), self.version))
                versions.append(self.version)
        names = list(self.answers) if ids is None else [name for name in ids if name in self.answers]
        over = {name: len(self.answers[name][1]) >= length(self.answers[name][0]) for name in names}
        return [self._leave(name, "stop" if over[name] else "withdrawn") for name in names]


def test_one_that_ends_while_it_is_taken_back_is_not_sampled_further():
    giver = Rank(TokenBackend(length), REQUESTS[6:], passes=1)
    taker = Rank(Late(length, max_running=9), [], passes=1)
    taker.run_ahead()
    for _ in range(3):
        taker.decode()
        giver.decode()
    hand_over(giver, taker, 11)
    for _ in range(200):
        taker.decode()
    ahead = taker.ahead()
    assert {name: len(output) for name, output in ahead.items()} == {r.id: length(r) for r in FOLLOWING}


class NotReady(TokenBackend):
    """An engine that takes nothing before it has weights."""

    def submit(self, requests):
        raise BackendError("no weights yet")


def test_before_a_step_nothing_is_asked_of_an_engine():
    host = Host(NotReady(length), version=0)
    host.decode()
    assert not host.is_busy


class Losing(TokenBackend):
    """An engine that forgets what it has."""

    def collect(self, timeout_s=None, *, max_passes=None):
        self.answers.clear()
        return []


@pytest.mark.parametrize("limit", [{}, {"max_passes": 4}, {"timeout_s": 60.0}])
def test_an_engine_that_loses_its_requests_is_named(limit):
    rank = Rank(Losing(length), REQUESTS[:3], passes=4)
    with pytest.raises(BackendError, match="Losing lost 3 requests"):
        rank.host.decode(**limit)


class Twice(TokenBackend):
    """An engine that gives each answer again."""

    def collect(self, timeout_s=None, *, max_passes=None):
        found = super().collect(timeout_s, max_passes=max_passes)
        return [*found, *found]


def test_an_answer_that_comes_twice_is_an_error():
    rank = Rank(Twice(length), REQUESTS[:3], passes=100)
    with pytest.raises(BackendError, match="Twice gave the answer to .* twice, or unasked"):
        rank.decode()


def test_an_answer_of_a_step_that_was_given_up_is_no_answer_of_the_next_one():
    rank = Rank(TokenBackend(length), REQUESTS[:3], passes=4)
    rank.decode()
    rank.step = step_of(rank.host, StepRequests(step=1, requests=FOLLOWING))
    rank.step.go_on(FOLLOWING)
    with pytest.raises(BackendError, match="the answer to 0/.* has come, which is of no step that is under way"):
        collections.deque((rank.decode() for _ in range(200)), maxlen=0)


def test_a_rank_was_busy_for_its_latest_answers_only():
    backend = TokenBackend(length, pass_s=0.005)
    workers = RankWorkers(backend=backend, scheduler=FIFOScheduler(), ranks=Alone())
    assert len(list(workers.answer(StepRequests(step=0, requests=REQUESTS)))) == len(REQUESTS)
    backend.pass_s = 0.0
    started = time.perf_counter()
    assert len(list(workers.answer(StepRequests(step=1, requests=FOLLOWING)))) == len(FOLLOWING)
    assert 0 < workers.busy_s <= time.perf_counter() - started
