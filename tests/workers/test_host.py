"""The host of a worker's engine, by itself: in which order it hands requests over, and what it remembers."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.spans import EVALUATION
from rhymerl.budgets import FixedBudget
from rhymerl.history import HistoryStore
from rhymerl.history.packing import PackedPrompt
from rhymerl.testing import make_answer
from rhymerl.types import Prompt, RolloutRequest, SamplingParams
from rhymerl.workers.messages import HistoryUpdate, Submit, Weights, Withdraw
from rhymerl.workers.remote.host import WorkerHost
from rhymerl.workers.versions import Versions
from tests.rollout.tokens import TokenBackend, token
from tests.workers.late import NotingBackend

AHEAD = 4  # so many of later steps run beside an earlier one


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
    return Submit(requests=requests(step, count), priority=step, versions=Versions(oldest=0, final=0))


class Learning(FixedBudget):
    learned = 0

    def state_dict(self):
        return {"learned": self.learned}

    def load_state_dict(self, state):
        self.learned = state["learned"]


def hosted(length, engine_of=TokenBackend, budget=None) -> tuple[WorkerHost, TokenBackend]:
    engine = engine_of(length, max_running=16)
    host = WorkerHost(lambda source, version: engine, history=HistoryStore(), budget=budget)
    host.post(Weights(version=0, source=dict))
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


def test_it_goes_on_with_what_waits_when_all_that_ran_have_ended_at_once():
    """Nobody needs to tell it."""
    host, _ = hosted(lambda request: 3)
    thread = threading.Thread(target=host.run)
    thread.start()
    try:
        for message in (submit(0, 3), submit(1, 8)):
            host.post(message)
        ended, until = [], time.monotonic() + 30
        while len(ended) < 11 and time.monotonic() < until:
            ended += host.poll(0.05).finished
    finally:
        host.close()
        thread.join()
    assert sorted(name for name, _ in ended) == sorted(
        f"{step}/{n}" for step, count in ((0, 3), (1, 8)) for n in range(count)
    )


def test_what_has_ended_ahead_is_told_of_before_it_waits_for_the_next_message():
    """A checkpoint, or whoever follows a lost worker, goes by what was told."""
    host, _ = hosted(lambda request: 3)
    thread = threading.Thread(target=host.run)
    thread.start()
    try:
        host._reported_at = time.monotonic() + 60
        host.post(
            Submit(requests=requests(1, 4), priority=1, versions=Versions(oldest=0, final=1))
        )  # which the next policy samples again
        told, until = 0, time.monotonic() + 30
        while told < 12 and time.monotonic() < until:
            told += sum(len(each.output) for each in host.poll(0.05).deltas)
    finally:
        host.close()
        thread.join()
    assert told == 12


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


def test_requests_that_had_to_wait_for_others_are_told_of_again_once_they_run():
    host, _ = hosted(lambda request: 2 if request.step == 0 else 50, NotingBackend)
    host.post(submit(1, 1))
    host.step(max_passes=3)
    host.post(submit(0, 1))
    told = [(tail.id, tail.start, len(tail.output)) for _ in range(3) for tail in host.step(max_passes=4).deltas]
    assert told == [("1/0", 3, 4), ("1/0", 7, 4), ("1/0", 11, 4)]


def test_requests_of_steps_stay_where_they_are_while_only_evaluations_are_answered():
    host, engine = hosted(lambda request: 5 if request.step == EVALUATION else 50)
    host.post(submit(1, 2))
    host.step(max_passes=3)
    host.post(submit(EVALUATION, 1))
    assert host.step(max_passes=3, only_evaluates=True).finished == []
    assert list(engine.answers) == [f"{EVALUATION}/0"]
    assert [name for name, _ in host.step(max_passes=3, only_evaluates=True).finished] == [f"{EVALUATION}/0"]
    assert list(engine.answers) == []
    host.step(max_passes=3)
    assert {name: len(tokens) for name, (_, tokens, _) in engine.answers.items()} == {"1/0": 6, "1/1": 6}


def test_in_lockstep_a_budget_learns_nothing_from_evaluations():
    host, _ = hosted(lambda request: 5 if request.step == EVALUATION else 50, budget=(budget := Learning()))
    host.post(submit(1, 2))
    host.step(max_passes=3)
    budget.learned = 3
    host.post(submit(EVALUATION, 1))
    host.step(max_passes=3, only_evaluates=True)
    budget.learned = 8
    host.step(max_passes=3, only_evaluates=True)
    assert budget.learned == 8
    host.step(max_passes=3)
    assert budget.learned == 3


def test_what_is_withdrawn_comes_back_with_its_tokens_also_with_those_that_it_brought():
    host, _ = hosted(lambda request: 50)
    host.post(submit(0, 2))
    host.step(max_passes=3)
    host.post(Withdraw(ids=["0/0"]))
    ((name, output),) = host.step(max_passes=1).released
    assert (name, len(output)) == ("0/0", 3)
    (request,) = requests(0, 1)
    host.post(
        Submit(requests=[replace(request, id="0/9", output=output)], priority=0, versions=Versions(oldest=0, final=0))
    )
    host.post(Withdraw(ids=["0/9"]))
    ((name, again),) = host.step(max_passes=1).released
    assert (name, again.token_ids.tolist()) == ("0/9", output.token_ids.tolist())


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


def test_what_it_remembers_stays_within_its_bound_and_it_tells_what_has_gone():
    most, length = 1_000, 30
    history = HistoryStore(max_tokens=most)
    host = WorkerHost(lambda source, version: TokenBackend(lambda request: 1, max_running=1), history=history)
    told, bytes_of = [], []
    for number in range(200):
        prompt = PackedPrompt(
            split="train", key=str(number), token_ids=np.array([number], np.int32), answers=[make_answer(range(length))]
        )
        host.post(HistoryUpdate(prompts=[prompt]))
        events = host.step(max_passes=1)
        told += events.forgotten
        bytes_of.append(events.history_bytes)
        assert history.num_tokens <= most
    kept = most // length
    assert told == [("train", str(number)) for number in range(200 - kept)]
    assert max(bytes_of) == bytes_of[-1] == 4 * kept * (length + 1), "answers, and a token of each prompt"


def test_what_an_older_policy_has_sampled_is_a_draft_for_the_one_that_the_answer_is_to_be_of():
    host, engine = hosted(lambda request: 9, NotingBackend)
    host.post(Submit(requests=requests(1, 1), priority=1, versions=Versions(oldest=0, final=1)))
    host.post(Submit(requests=requests(2, 1), priority=2, versions=Versions(oldest=0, final=2)))
    host.step(max_passes=4)
    host.post(Weights(version=1, source=dict))
    host.step(max_passes=1)
    (own, _, _), (later, tokens, _) = engine.answers["1/0"], engine.answers["2/0"]
    assert (own.prefetched.tolist(), own.output) == ([token(0, at, 0) for at in range(4)], None)
    assert (later.prefetched, len(tokens)) == (None, 5), "which is a draft for version 2 all the same"


def test_whoever_comes_with_a_whole_answer_is_done():
    host, engine = hosted(lambda request: 9)
    host.post(submit(0, 1))
    ((_, output),) = host.step(max_passes=20).finished
    (request,) = requests(0, 1)
    given = [replace(request, id="0/8", output=output)]
    host.post(Submit(requests=given, priority=0, versions=Versions(oldest=0, final=0)))
    assert [name for name, _ in host.step(max_passes=1).finished] == ["0/8"]
    assert not engine.answers


def test_a_request_that_is_here_already_is_refused():
    host, _ = hosted(lambda request: 9)
    host.post(submit(0, 2))
    host.post(submit(0, 1))
    assert "0/0 twice" in str(host.step(max_passes=1).error)


def test_when_the_last_of_an_earlier_step_is_withdrawn_the_next_step_begins():
    host, engine = hosted(lambda request: 50)
    for message in (submit(0, 1), submit(1, 8), Withdraw(ids=["0/0"])):
        host.post(message)
        host.step(max_passes=1)
    assert list(engine.answers) == [f"1/{number}" for number in range(8)]


def test_an_engine_that_cannot_say_what_it_has_is_not_said_to_have_lost_it():
    class Blind(TokenBackend):
        progress = RolloutBackend.progress

    host, _ = hosted(lambda request: 50, Blind)
    host.post(submit(0, 2))
    assert host.step(max_passes=3).error is None


class Slow:
    """Weights that take until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self):
        self.go.wait(60)
        return {}


def test_what_is_given_back_is_told_before_new_weights_are_loaded():
    """Whoever goes on with it need not wait for them."""
    engine, weights = TokenBackend(lambda request: 10**6, max_running=16, pass_s=0.001), Slow()
    host = WorkerHost(lambda source, version: (source(), engine)[1], history=HistoryStore())
    thread = threading.Thread(target=host.run)
    host.post(Weights(version=0, source=dict))
    host.post(submit(0, 2))
    thread.start()
    try:
        with host._changed:
            host.post(Withdraw(ids=["0/0"]))
            host.post(Weights(version=1, source=weights))
        assert [name for name, _ in host.poll(60).released] == ["0/0"]
    finally:
        weights.go.set()
        host.close()
        thread.join()
