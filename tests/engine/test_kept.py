"""Keys and values kept between an episode's turns: fewer tokens computed, the same tokens sampled, no slot lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rhymerl.engine.engine import Engine
from rhymerl.testing import RandomTreeDrafter, make_requests, tiny_policy
from rhymerl.types import Output, RolloutRequest, TurnEnd
from tests.products import values_first

STOPS = (2, 3, 4, 5)
TURNS = 4


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(num_layers=1)


def asked(count: int, **changed) -> list[RolloutRequest]:
    made = make_requests(count, group_size=3, max_tokens=24, stop_token_ids=STOPS)
    return [replace(each, may_go_on=True, **changed) for each in made]


def reply(name: str, turn: int) -> list[int]:
    draw = random.Random(f"{name}/{turn}")
    return [draw.randrange(1, 16) for _ in range(draw.randint(1, 9))]


def replied(output: Output, tokens: list[int]) -> Output:
    """Return the answer with a reply behind it."""
    end = TurnEnd(start=len(output), stop=len(output) + len(tokens), text="")
    return replace(output + Output.of(tokens), turns=(*output.turns, end))


def next_turn(request: RolloutRequest, output: Output | None) -> RolloutRequest:
    """Return the request of a turn of at most 24 tokens."""
    most = 24 + (len(output) if output else 0)
    return replace(request, output=output, sampling=replace(request.sampling, max_tokens=most))


def renew(engine: Engine) -> None:
    """The policy has changed: other keys and values follow from the same tokens."""
    engine.new_weights(1)
    with torch.no_grad():
        for name, weight in engine.model.named_parameters():
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                weight.mul_(-1.5)


def play(engine: Engine, requests: list[RolloutRequest], *, weights_after: int | None = None) -> dict[str, list[int]]:
    """Answer each stop with a reply, up to so many turns; returns the tokens of each episode."""
    turns, tokens, steps = dict.fromkeys((each.id for each in requests), 0), {}, 0
    engine.submit(requests)
    with engine.forward.ready():
        while engine.has_work:
            steps += 1
            if steps == weights_after:
                renew(engine)
            for done in engine.step():
                name = done.request.id
                turns[name] += 1
                if done.finish_reason == "stop" and turns[name] < TURNS:
                    engine.submit([next_turn(done.request, replied(done.output, reply(name, turns[name])))])
                else:
                    tokens[name] = done.token_ids.tolist()
                    engine.forget([name])
            engine.check_integrity()
    return tokens


def fed(engine: Engine) -> list[int]:
    counts: list[int] = []
    engine.observers.append(lambda record: counts.append(record.prompt_tokens + record.rows))
    return counts


def test_a_turn_computes_only_what_is_new(policy):
    requests = asked(2)
    engine, forgetful = Engine(policy.model), Engine(policy.model)
    kept, again = fed(engine), fed(forgetful)
    tokens = play(engine, requests)
    assert tokens == play(forgetful, [replace(each, may_go_on=False) for each in requests])
    prompts = {bytes(each.prompt.token_ids[:-1].tobytes()): len(each.prompt.token_ids) - 1 for each in requests}
    # Each token is fed once, but for each answer's last, and the last of each prompt by all of its samples.
    assert sum(kept) == sum(prompts.values()) + sum(map(len, tokens.values()))
    assert sum(again) > 1.5 * sum(kept)
    assert engine.kv.pool.num_free == forgetful.kv.pool.num_free
    assert not engine.admission.kept.held


@pytest.mark.parametrize(
    ("settings", "drafter"),
    values_first(
        [{"max_running": 2}, {"kv_tokens": 150}, {"max_pass_tokens": 5}, {"max_running": 1}],
        {"plain": None, "drafts": RandomTreeDrafter(vocabulary=16)},
    ),
)
def test_others_get_the_room_that_they_need(policy, settings, drafter):
    requests = asked(4)
    plain = play(Engine(policy.model), [replace(each, may_go_on=False) for each in requests])
    assert play(Engine(policy.model, drafter=drafter, **settings), requests) == plain


@pytest.mark.parametrize(
    "weights_after", [pytest.param(each, marks=() if each in (2, 5, 9) else pytest.mark.slow) for each in range(2, 12)]
)
def test_new_weights_leave_nothing_of_the_old(weights_after):
    requests = asked(4)
    engine, forgetful = (Engine(tiny_policy(num_layers=1).model) for _ in range(2))
    plain = play(forgetful, [replace(each, may_go_on=False) for each in requests], weights_after=weights_after)
    assert play(engine, requests, weights_after=weights_after) == plain


def test_new_weights_free_the_rows_of_turns_that_are_over(policy):
    engine = Engine(policy.model)
    engine.submit(asked(1))
    engine.run()
    assert engine.admission.kept.held
    engine.new_weights(1)
    assert not engine.admission.kept.held
    engine.check_integrity()


def test_another_request_of_the_name_is_computed_anew(policy):
    """Such as one that begins again under the same weights, or one whose answer was changed."""
    engine, request = Engine(policy.model), asked(1)[0]
    engine.submit([request])
    (done,) = engine.run()
    assert done.finish_reason == "stop"
    assert engine.admission.kept.held
    other = done.output.token_ids.copy()
    other[0] = 1 + other[0] % 15
    for output in (None, replied(Output.of(other), [7])):
        engine.submit([next_turn(request, output)])
        changed = Engine(policy.model)
        changed.submit([next_turn(replace(request, may_go_on=False), output)])
        assert engine.run()[0].token_ids.tolist() == changed.run()[0].token_ids.tolist()
        engine.check_integrity()


def test_a_turn_is_handed_over_in_the_pass_in_which_it_ends(policy):
    """What ends for good may wait some passes; `max_passes` holds for both."""
    requests = asked(4)
    engine, lazy, counted = Engine(policy.model), Engine(policy.model), Engine(policy.model)
    engine.submit(requests)
    first = min(each.num_passes for each in engine.run())
    assert engine.totals.passes == first
    lazy.submit([replace(each, may_go_on=False) for each in requests])
    lazy.run()
    assert lazy.totals.passes > first
    counted.submit(requests)
    counted.run(max_passes=first + 1)
    assert counted.totals.passes == first + 1


def test_a_request_that_is_withdrawn_keeps_nothing(policy):
    engine, requests = Engine(policy.model), asked(3)
    engine.submit(requests)
    engine.run(max_passes=1)
    engine.withdraw()
    engine.check_integrity()
    assert not engine.admission.kept.held


def test_what_passes_need_is_freed_once_no_request_may_go_on():
    engine = Engine(tiny_policy(dtype="float32").model)
    engine.submit(asked(1)[:1])
    (done,) = engine.run()
    assert done.finish_reason == "stop"
    assert engine.forward._direct is not None
    engine.forget([done.request.id])
    assert engine.forward._direct is None
