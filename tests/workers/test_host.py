"""The host of a worker's engine, by itself: in which order it hands requests over."""

from __future__ import annotations

from rhymerl.backends.hosted.host import WorkerHost
from rhymerl.backends.hosted.messages import Submit, Weights, WeightSource
from rhymerl.history import HistoryStore
from rhymerl.types import Prompt, RolloutRequest, SamplingParams
from tests.rollout.tokens import TokenBackend

AHEAD = 4  # so many of later steps run beside an earlier one


class NoWeights(WeightSource):
    def load(self):
        return {}


def requests(step: int, count: int) -> list[RolloutRequest]:
    prompt = Prompt(id="p", key="p", token_ids=[1], text="")
    return [
        RolloutRequest(
            id=f"{step}/{number}",
            prompt=prompt,
            sample=number,
            seed=number,
            step=step,
            sampling=SamplingParams(max_tokens=64),
        )
        for number in range(count)
    ]


def submit(step: int, count: int) -> Submit:
    return Submit(requests=requests(step, count), rank=step, oldest=0, final=0)


def hosted(length) -> tuple[WorkerHost, TokenBackend]:
    engine = TokenBackend(length, max_running=16)
    host = WorkerHost(lambda source, version: engine, history=HistoryStore())
    host.post(Weights(version=0, source=NoWeights()))
    return host, engine


def running(engine: TokenBackend, step: int) -> list[str]:
    return [name for name in engine.answers if name.startswith(f"{step}/")]


def test_few_requests_of_later_steps_run_beside_an_earlier_one_and_all_of_them_behind_it():
    host, engine = hosted(lambda request: 9 if request.id == "0/0" else 5 + 3 * (request.step > 0))
    for message in (submit(0, 3), submit(1, 8)):
        host.post(message)
    ended = host.step(max_passes=6).finished
    assert [name for name, _ in ended] == ["0/1", "0/2"]
    assert running(engine, 0) == ["0/0"]
    assert running(engine, 1) == [f"1/{number}" for number in range(AHEAD)]
    host.step(max_passes=2)  # the first four of step 1 have ended, the last of step 0 has not
    host.step(max_passes=1)
    assert running(engine, 1) == [f"1/{number}" for number in range(AHEAD, 8)]
    assert running(engine, 0) == []


def test_an_earlier_request_that_comes_late_goes_before_later_steps_which_keep_what_they_have():
    host, engine = hosted(lambda request: 20)
    host.post(submit(1, 8))
    host.step(max_passes=3)
    assert len(running(engine, 1)) == 8
    host.post(submit(0, 2))
    host.step(max_passes=1)
    assert list(engine.answers) == ["0/0", "0/1", *(f"1/{number}" for number in range(AHEAD))]
    assert [len(engine.answers[f"1/{number}"][1]) for number in range(AHEAD)] == [4] * AHEAD
    finished = [name for _ in range(12) for name, _ in host.step(max_passes=10).finished]
    assert sorted(finished) == sorted([*(f"1/{number}" for number in range(8)), "0/0", "0/1"])


def test_requests_that_run_are_left_alone_when_others_of_later_steps_wait():
    host, engine = hosted(lambda request: 50)
    for message in (submit(0, 1), submit(1, 6), submit(2, 6)):
        host.post(message)
    host.step(max_passes=2)
    withdrawn: list[str] = []
    engine.withdraw = lambda ids=None: withdrawn.extend(ids or []) or []  # type: ignore[method-assign]
    for _ in range(5):
        host.step(max_passes=2)
    assert withdrawn == []
    assert list(engine.answers) == ["0/0", *(f"1/{number}" for number in range(AHEAD))]
