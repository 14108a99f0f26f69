"""A rank's part of a step, when requests of other ranks come to it late."""

from __future__ import annotations

import pytest

from rhymerl.rollout import requests_of
from rhymerl.rollout.part import Pace, Part
from tests.rollout.test_ranks import PROMPTS, SETTINGS, length
from tests.rollout.tokens import TokenBackend, token

REQUESTS = requests_of(PROMPTS[:4], 0, SETTINGS, seed=0, stop_token_ids=())
FOLLOWING = requests_of(PROMPTS[:2], 1, SETTINGS, seed=0, stop_token_ids=())


def part(backend: TokenBackend, queue, *, passes: int) -> Part:
    return Part(backend, queue, requests=REQUESTS, drawn={}, pace=Pace(max_passes=passes))


def hand_over(giver: Part, taker: Part, place: int) -> None:
    giver.give_away({place: 1})
    taker.receive([parcel.value for parcel in giver.parcels()])


@pytest.mark.parametrize("comes_late", [False, True])
def test_one_that_comes_after_the_plan_leaves_the_following_step_to_be_begun(comes_late):
    giver, taker = (part(TokenBackend(length), REQUESTS[6 * i : 6 * i + 6], passes=4) for i in range(2))
    giver.decode()
    taker.decode()
    taker.run_ahead(FOLLOWING)
    if comes_late:
        hand_over(giver, taker, 5)
    ended = [completion.request.id for _ in range(100) for completion in taker.decode()]
    assert len(ended) == 6 + comes_late
    assert len(taker.pause()) == len(FOLLOWING)


class Late(TokenBackend):
    """As an engine in another process: what has nearly ended does so while it is withdrawn."""

    def withdraw(self, ids=None):
        for request, tokens, versions in self.answers.values():
            while length(request) - 2 <= len(tokens) < length(request):
                tokens.append(token(request.seed, len(tokens), self.version))
                versions.append(self.version)
        names = list(self.answers) if ids is None else [name for name in ids if name in self.answers]
        over = {name: len(self.answers[name][1]) >= length(self.answers[name][0]) for name in names}
        return [self._leave(name, "stop" if over[name] else "withdrawn") for name in names]


def test_one_that_ends_while_it_is_taken_back_is_not_drawn_further():
    giver = part(TokenBackend(length), REQUESTS[6:], passes=1)
    taker = part(Late(length, max_running=9), [], passes=1)
    taker.run_ahead(FOLLOWING)
    for _ in range(3):
        taker.decode()
        giver.decode()
    hand_over(giver, taker, 11)
    for _ in range(200):
        taker.decode()
    ahead = taker.pause()
    assert {name: len(drawn.generated) for name, drawn in ahead.items()} == {r.id: length(r) for r in FOLLOWING}
