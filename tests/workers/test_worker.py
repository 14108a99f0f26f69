"""A worker to which requests of others come late."""

from __future__ import annotations

import pytest

from rhymerl.errors import BackendError
from rhymerl.rollout import requests_of
from rhymerl.workers.worker import DecodeLimits, Worker
from tests.rollout.ranked import PROMPTS, SETTINGS, length
from tests.rollout.tokens import TokenBackend, token

REQUESTS = requests_of(PROMPTS[:4], 0, SETTINGS, seed=0, stop_token_ids=())
FOLLOWING = requests_of(PROMPTS[:2], 1, SETTINGS, seed=0, stop_token_ids=())


def worker(backend: TokenBackend, queue, *, passes: int) -> Worker:
    made = Worker(backend)
    made.begin_step(queue, requests=REQUESTS, outputs={}, limits=DecodeLimits(max_passes=passes))
    return made


def hand_over(giver: Worker, taker: Worker, index: int) -> None:
    giver.give_back({index: 1})
    taker.receive([message.value for message in giver.messages()])


@pytest.mark.parametrize("comes_late", [False, True])
def test_one_that_comes_after_the_plan_leaves_the_following_step_to_be_begun(comes_late):
    giver, taker = (worker(TokenBackend(length), REQUESTS[6 * i : 6 * i + 6], passes=4) for i in range(2))
    giver.decode()
    taker.decode()
    taker.run_ahead(FOLLOWING)
    if comes_late:
        hand_over(giver, taker, 5)
    ended = [completion.request.id for _ in range(100) for completion in taker.decode()]
    assert len(ended) == 6 + comes_late
    assert len(taker.pause()) == len(FOLLOWING)


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
    giver = worker(TokenBackend(length), REQUESTS[6:], passes=1)
    taker = worker(Late(length, max_running=9), [], passes=1)
    taker.run_ahead(FOLLOWING)
    for _ in range(3):
        taker.decode()
        giver.decode()
    hand_over(giver, taker, 11)
    for _ in range(200):
        taker.decode()
    ahead = taker.pause()
    assert {name: len(output) for name, output in ahead.items()} == {r.id: length(r) for r in FOLLOWING}


class NotReady(TokenBackend):
    """An engine that takes nothing before it has weights."""

    def submit(self, requests):
        raise BackendError("no weights yet")


def test_before_a_step_nothing_is_asked_of_an_engine():
    assert not Worker(NotReady(length)).is_busy
