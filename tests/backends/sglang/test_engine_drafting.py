"""A drafter inside SGLang hears what it hears inside the embedded engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rhymerl.backends.sglang.plugin.drafting import EngineDrafting
from rhymerl.budgets import FixedBudget
from rhymerl.engine.engine import Engine
from rhymerl.testing import make_requests, tiny_policy
from tests.backends.sglang.batches import Recorder, fake, propose, run, step

N = 8

PER_TOKEN = ("token_ids", "logprobs", "policy_versions", "sources")


def embedded(requests, drafter):
    """The embedded engine's completions, by request id."""
    engine = Engine(tiny_policy().model, drafter=drafter, budget=FixedBudget(N - 1), max_running=99)
    engine.submit(requests)
    done = {}
    while engine.has_work:
        done.update((each.request.id, each) for each in engine.run())
    return done


@pytest.fixture(scope="module")
def problem():
    """Requests, some of which go on from tokens, and their answers."""
    new = make_requests(6, group_size=2, max_tokens=20, stop_token_ids=(1, 5))
    short = [replace(each, id=f"short {each.id}") for each in make_requests(4, seed=1, max_tokens=3)]
    one = [replace(each, id=f"one {each.id}") for each in make_requests(2, seed=2, max_tokens=1)]
    whole = embedded([*new, *short, *one], Recorder())
    answers = {name: each.token_ids.tolist() for name, each in whole.items()}
    requests = [*new, *short, *one]
    for request in new[::3]:
        count = len(answers[request.id]) // 2
        generated = whole[request.id].output
        if count:
            part = {name: getattr(generated, name)[:count] for name in PER_TOKEN}
            resumed = replace(request, id=f"on {request.id}", output=replace(generated, **part))
            requests.append(resumed)
            answers[resumed.id] = answers[request.id]
    return requests, answers


def decoded(requests, answers):
    """Return the answers of more than one token: shorter ones end with the prefill, and no drafter sees them."""
    return [r for r in requests if len(answers[r.id]) - (len(r.output) if r.output else 0) > 1]


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
def test_hooks_are_called_as_the_embedded_engine_calls_them(problem, overlap):
    requests, answers = problem
    ours = Recorder(answers)
    embedded(requests, ours)
    theirs = Recorder(answers)
    drafting = EngineDrafting(theirs, FixedBudget(N - 1), vocabulary=19)
    run(drafting, [fake(request, answers[request.id]) for request in requests], overlap=overlap)
    for request in decoded(requests, answers):
        assert theirs.told[request.id] == ours.told[request.id]
    accepted = [what[2] for told in theirs.told.values() for what in told if what[0] == "accept"]
    ends = {what[2] for told in theirs.told.values() for what in told if what[0] == "finish"}
    assert max(accepted) >= 3, "too little was accepted to tell anything"
    assert ends == {"stop", "length"}
    assert any(told[-2][2] == len(told[-2][1]) for told in theirs.told.values()), "no stop token was drafted"


def test_who_ends_where_the_prompt_is_read_is_never_heard_of(problem):
    requests, answers = problem
    drafter = Recorder(answers)
    run(
        EngineDrafting(drafter, FixedBudget(N - 1), vocabulary=19),
        [fake(request, answers[request.id]) for request in requests],
    )
    assert drafter.told.keys() == {request.id for request in decoded(requests, answers)}


def test_requests_that_come_later_or_go_earlier_change_nothing(problem):
    requests, answers = problem
    alone, together = Recorder(answers), Recorder(answers)
    for request in requests:
        run(EngineDrafting(alone, FixedBudget(N - 1), vocabulary=19), [fake(request, answers[request.id])])
    run(
        EngineDrafting(together, FixedBudget(N - 1), vocabulary=19),
        [fake(request, answers[request.id]) for request in requests],
    )
    assert alone.told == together.told


def test_who_is_put_back_into_the_queue_has_not_finished(problem):
    requests, answers = problem
    first, other = (fake(r, answers[r.id]) for r in sorted(requests, key=lambda r: -len(answers[r.id]))[:2])
    name, drafter = first.rid.removeprefix("rid-"), Recorder(answers)
    drafting = EngineDrafting(drafter, FixedBudget(N - 1), vocabulary=19)
    for request in (first, other):
        request.commit([request.draw(0)])
    first.commit(step(drafting, [first, other], [(), ()])[0])
    other.commit(step(drafting, [other], [()])[0])
    first.commit([first.draw(len(first.output_ids))])  # what it draws when its tokens are read again
    while not first.finished():
        first.commit(step(drafting, [first], [()])[0])
    propose(drafting, [], [])
    kinds = [what[0] for what in drafter.told[name]]
    assert kinds.count("start") == kinds.count("finish") == 1
    heard = sum((what[1] for what in drafter.told[name] if what[0] == "accept"), [])
    assert heard == drafter.told[name][-1][1][-len(heard) :] == answers[name][-len(heard) :]


def test_a_request_that_is_given_up_has_what_it_drew(problem):
    requests, answers = problem
    request = fake(*max(((r, answers[r.id]) for r in requests), key=lambda pair: len(pair[1])))
    drafter = Recorder(answers)
    drafting = EngineDrafting(drafter, FixedBudget(N - 1), vocabulary=19)
    request.commit([request.draw(0)])
    request.commit(step(drafting, [request], [()])[0])
    request.end("abort")
    propose(drafting, [], [])
    told = drafter.told[request.rid.removeprefix("rid-")]
    assert told[-1] == ("finish", request.output_ids, "withdrawn")
    assert [what[0] for what in told] == ["start", "accept", "accept", "finish"]


def test_who_was_taken_out_of_the_queue_is_gone_when_the_engine_is_empty(problem):
    requests, answers = problem
    request = fake(*max(((r, answers[r.id]) for r in requests), key=lambda pair: len(pair[1])))
    drafter = Recorder(answers)
    drafting = EngineDrafting(drafter, FixedBudget(N - 1), vocabulary=19)
    request.commit([request.draw(0)])
    step(drafting, [request], [()])
    propose(drafting, [], [])
    told = drafter.told[request.rid.removeprefix("rid-")]
    assert told[-1][0] == "accept"
    drafting.flush()
    assert told[-1] == ("finish", request.output_ids, "withdrawn")
    drafting.flush()
    assert [what[0] for what in told].count("finish") == 1
