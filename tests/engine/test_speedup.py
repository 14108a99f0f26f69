"""What drafts are worth: the passes that the same answers would have taken without them, and their time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rhymerl.budgets import FixedBudget
from rhymerl.budgets.timeline import PlainPasses
from rhymerl.drafters import Drafter, NoDrafter
from rhymerl.drafts import Draft
from rhymerl.engine.engine import Engine
from rhymerl.engine.speedup import SpeedupMeter, is_due_plain
from rhymerl.engine.totals import PassRecord
from rhymerl.testing import OracleDrafter, make_requests, tiny_policy
from rhymerl.types import Completion, Output


def a_pass(*, rows: int, asked: int, seen: int, seconds: float) -> PassRecord:
    """A pass with a node for each request that was asked for."""
    counts = {"prompt_tokens": 0, "draft_s": 0.0, "end_s": 0.0, "num_emitted": rows, "is_tail": False}
    return PassRecord(rows=rows, nodes=asked, asked=asked, seen=seen, seconds=seconds, **counts)


def sizes(engine: Engine, requests) -> tuple[list[int], list[int], list[Completion]]:
    """Return by pass the rows and the keys that they see, and the answers in the order of the requests."""
    engine.submit(requests)
    records, done = [], {}
    engine.observers.append(records.append)
    while engine.has_work:
        done |= {each.request.id: each for each in engine.run()}
    engine.observers.remove(records.append)
    rows, seen = [each.rows for each in records], [each.seen for each in records]
    return rows, seen, [done[request.id] for request in requests]


@pytest.mark.parametrize("slots", [1, 3, 5, 16])
def test_the_passes_without_drafts_are_those_of_an_engine_without_a_drafter(slots: int) -> None:
    model = tiny_policy().model
    requests = make_requests(4, group_size=4, max_tokens=20, stop_token_ids=(1, 2, 3))
    rows, seen, answers = sizes(Engine(model, drafter=NoDrafter(), max_running=slots), requests)
    lengths = np.array([len(each.token_ids) for each in answers])
    assert len(set(lengths.tolist())) > 3
    context = np.array([len(request.prompt.token_ids) for request in requests])
    found = PlainPasses.of(lengths, context, slots)
    assert (found.rows.tolist(), found.seen.tolist()) == (rows, seen)


def test_the_turns_of_an_episode_come_one_behind_the_other_without_drafts_too() -> None:
    """One of three turns beside two short answers: with two slots, it is what takes its time."""
    meter = SpeedupMeter(2, now=lambda: 0.0)
    requests = [replace(each, id=str(n)) for n, each in enumerate(make_requests(3, max_tokens=20))]
    turns = {0: [4, 4, 4], 1: [2], 2: [2]}
    meter.submit(requests)
    for number, lengths in turns.items():
        request, output = requests[number], Output.of()
        for turn, length in enumerate(lengths):
            if turn:  # behind a reply of three tokens
                output = output + Output.of([1] * 3)
                meter.submit([replace(request, output=output)])
            output = output + Output.of([1] * length)
            meter.leave([Completion(request=request, output=output)])
    meter.note(a_pass(rows=2, asked=0, seen=1, seconds=1.0))
    meter.report({})
    ((episode, *others),) = meter._rollouts
    assert (episode.sampled, [each.sampled for each in others]) == (12, [2, 2])
    plain = PlainPasses.of(np.array([12, 2, 2]), np.array([1, 1, 1]), 2)
    assert len(plain.rows) == 12


def feed(
    meter: SpeedupMeter,
    engine: Engine,
    requests,
    rng: np.random.Generator,
    *,
    factor: float = 1.0,
    cold: tuple[float, ...] = (),
) -> float:
    """Answer requests on a machine of known costs; returns what is said, and compares it with what is true.

    The first passes without drafts behind those with drafts take `cold` times as long as in a row.
    """

    def seconds(rows: int, nodes: int, asked: int, prompts: int) -> float:
        return factor * (3e-3 + 8e-5 * (rows + nodes) + of_prompts(prompts)) + draft_seconds(asked)

    def of_prompts(tokens: int) -> float:
        return 2e-5 * tokens + 1.5e-3 * (tokens > 0)

    def draft_seconds(asked: int) -> float:
        return 2e-4 * asked

    meter.submit(requests)
    engine.submit(requests)
    taken, done, still_cold = [], {}, list(cold)

    def note(record: PassRecord) -> None:
        taken.append(seconds(record.rows, record.nodes, record.asked, record.prompt_tokens))
        if record.asked:
            still_cold[:] = cold
        elif still_cold:
            taken[-1] *= still_cold.pop(0)
        noisy = taken[-1] * (1 + 0.05 * rng.standard_normal())
        meter.note(record._replace(draft_s=draft_seconds(record.asked), seconds=noisy))

    engine.observers.append(note)
    while engine.has_work:
        completions = engine.run()
        meter.leave(completions)
        done |= {each.request.id: each for each in completions}
    engine.observers.remove(note)
    fresh = meter._passes[meter._first_pass :]
    meter._began_at, meter._ended_at = 0.0, sum(each.seconds for each in fresh)
    said = meter.report({}).get("rollout/speedup", float("nan"))
    lengths = np.array([len(done[request.id].token_ids) for request in requests])
    rows = PlainPasses.of(lengths, lengths, engine.max_running).rows
    plain = sum(seconds(int(each), 0, 0, 0) for each in rows) + factor * sum(
        of_prompts(each.prompt_tokens) for each in fresh
    )
    return said / (plain / sum(taken))


def errors_of(accepted: float, factors: list[float], **machine: Any) -> list[float]:
    """Return reported over true speed-up by policy version, at a share of right tokens; `factors` slow the machine."""
    model, rng = tiny_policy().model, np.random.default_rng(0)
    plain = Engine(model, drafter=NoDrafter())
    requests = make_requests(6, group_size=4, max_tokens=40, stop_token_ids=(1,))
    answers = {each.request.id: each.token_ids for each in sizes(plain, requests)[2]}
    drafts = {name: tokens if rng.random() < accepted else (tokens + 1) % 19 for name, tokens in answers.items()}
    engine = Engine(model, drafter=OracleDrafter(drafts), budget=FixedBudget(4), max_running=8)
    meter, errors = SpeedupMeter(8), []
    for version, factor in enumerate(factors):
        engine.new_weights(version)
        errors.append(feed(meter, engine, requests, rng, factor=factor, **machine))
    return errors


@pytest.mark.parametrize("accepted", [0.0, pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_what_is_said_is_what_is_true(accepted: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are all wrong, half of them right, or all right, on a machine that is ten times as slow at times."""
    monkeypatch.setattr("rhymerl.engine.speedup._LEAST_S", 0.0)
    errors = errors_of(accepted, [10.0 if version in (3, 7, 15) else 1.0 for version in range(24)])
    assert np.nanmedian(errors) == pytest.approx(1, abs=0.05)
    assert np.nanmax(np.abs(np.log(errors[8:]))) < 0.1


@pytest.mark.parametrize("accepted", [0.0, 1.0])
def test_a_pass_right_behind_drafts_is_no_baseline(accepted: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has left the caches: passes without drafts in a row, which a run without drafts has, take less."""
    monkeypatch.setattr("rhymerl.engine.speedup._LEAST_S", 0.0)
    errors = errors_of(accepted, [1.0] * 24, cold=(1.6, 1.2))
    assert np.nanmedian(errors) == pytest.approx(1, abs=0.04)
    assert np.nanmax(np.abs(np.log(errors[8:]))) < 0.1


def test_a_machine_that_has_become_slower_is_so_for_both_kinds_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most passes without drafts were before that."""
    monkeypatch.setattr("rhymerl.engine.speedup._LEAST_S", 0.0)
    errors = errors_of(1.0, [1.0] * 9 + [1.5] * 15)
    assert errors[9:] == pytest.approx([1.0] * 15, abs=0.05)


def test_requests_that_move_are_counted_where_and_when_they_were_answered() -> None:
    meter, requests = SpeedupMeter(4), make_requests(3, group_size=1, max_tokens=30)
    meter.submit(requests)
    output = Output(token_ids=np.arange(5, dtype=np.int32), logprobs=np.zeros(5), policy_versions=np.zeros(5, np.int32))
    meter.leave([Completion(request=requests[0], output=output)])
    meter.report({requests[1].id: 7, requests[2].id: 0})
    assert [(each.begun, each.context - each.begun) for each in meter._answers.values()] == [
        (7, len(requests[1].prompt.token_ids)),
        (0, len(requests[2].prompt.token_ids)),
    ]
    assert meter.report({requests[1].id: 9, requests[2].id: 3}) == {}  # no pass was counted


def test_short_rollouts_are_compared_together_and_one_by_one() -> None:
    """Those of one step do not run beside those of the next."""
    meter, requests, said = SpeedupMeter(8), make_requests(1, group_size=8, max_tokens=30), []
    output = Output.of(range(20))
    for number in range(40):
        meter.submit(requests)
        asked = 8 * (number % 2)
        for _ in range(10 if asked else 20):  # with drafts in half as many passes of the same cost
            meter.note(a_pass(rows=8, asked=asked, seen=160, seconds=5e-3))
        meter._began_at, meter._ended_at = 0.0, 5e-3 * (10 if asked else 20)
        meter.leave([Completion(request=request, output=output) for request in requests])
        said.append(meter.report({}).get("rollout/speedup"))
    assert said[:8].count(None) == 1  # passes of one kind only
    together = [each for each in said[8:] if each]
    assert len(together) == 4
    assert together == pytest.approx([4 / 3] * 4, rel=0.13)


def rollout(meter: SpeedupMeter, requests, *, asked: int, passes: int = 10) -> dict[str, float]:
    """Passes of 5 ms each, and all that the report says."""
    output = Output.of(range(20))
    meter.submit(requests)
    for _ in range(passes):
        meter.note(a_pass(rows=8, asked=asked, seen=160, seconds=5e-3))
    meter._began_at, meter._ended_at = 0.0, 5e-3 * passes
    meter.leave([Completion(request=request, output=output) for request in requests])
    return meter.report({})


def test_evaluations_are_left_out_and_take_nothing_away() -> None:
    training = make_requests(1, group_size=8, max_tokens=30)
    evaluation = [replace(request, split="validation") for request in training]
    found = []
    for evaluates in (False, True):
        meter, said = SpeedupMeter(8), []
        for number in range(40):
            said.append(rollout(meter, training, asked=8 * (number % 2)))
            if evaluates:
                assert rollout(meter, evaluation, asked=0, passes=50) == {}
        found.append(said)
    assert found[0] == found[1]
    assert sum(map(bool, found[0])) > 8


def test_rollouts_wait_until_passes_of_both_kinds_are_known() -> None:
    """The first ones are a part of the first figure."""
    meter, requests = SpeedupMeter(8), make_requests(1, group_size=8, max_tokens=30)
    assert [rollout(meter, requests, asked=8) for _ in range(3)] == [{}] * 3
    said = rollout(meter, requests, asked=0)["rollout/speedup"]
    assert said.whole == pytest.approx(4 * 10 * 5e-3)
    assert said.part == pytest.approx(4 * 20 * 5e-3, rel=0.1)


def test_a_meter_that_never_sees_a_pass_without_drafts_keeps_no_more_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rhymerl.engine.speedup._MOST_PASSES", 35)
    monkeypatch.setattr("rhymerl.engine.speedup._LEAST_S", 0.0)
    meter, requests = SpeedupMeter(8), make_requests(1, group_size=8, max_tokens=30)
    for _ in range(20):
        assert rollout(meter, requests, asked=8) == {}
        assert len(meter._passes) <= 35
        assert len(meter._rollouts) <= 4


def test_slots_that_had_no_room_for_keys_are_not_filled_without_drafts() -> None:
    """16 answers, of which never more than 8 ran: 40 passes without drafts, not 20."""
    meter, requests = SpeedupMeter(64), make_requests(2, group_size=8, max_tokens=30)
    said = [rollout(meter, requests, asked=8 * (number % 2), passes=40) for number in range(8)]
    assert said[-1]["rollout/speedup"] == pytest.approx(1.0, rel=0.05)


def test_few_passes_go_without_drafts_and_each_place_of_a_rollout_has_some() -> None:
    assert not any(is_due_plain(0, number) for number in range(100))  # perhaps there is no training
    later = [[is_due_plain(version, number) for number in range(1, 9)] for version in range(9, 329)]
    assert np.sum(later, axis=0).tolist() == [5] * 8  # 1 of 64
    for version in range(1, 9):
        due = [is_due_plain(version, number) for number in range(1, 161)]
        assert due[:80] == due[80:]  # 1 of 16
        assert sum(due[:80]) == 5
        assert sum(one and two for one, two in pairwise(due + due[:1])) == 8, "five in a row, twice"


def test_rollouts_of_a_few_passes_have_a_figure_from_the_second_on() -> None:
    meter, requests = SpeedupMeter(8), make_requests(1, group_size=8, max_tokens=30)
    output, said = Output.of(range(20)), []
    for version in range(8):
        meter.submit(requests)
        for number in range(1, 9):
            asked = 0 if is_due_plain(version, number) else 8
            meter.note(a_pass(rows=8, asked=asked, seen=160, seconds=5e-3))
        meter._began_at, meter._ended_at = 0.0, 40e-3
        meter.leave([Completion(request=request, output=output) for request in requests])
        said.append(meter.report({}).get("rollout/speedup"))
    assert said[0] is None
    assert said[1:] == pytest.approx([20 / 8] * 7, rel=0.1)


class Guess(Drafter):
    """Guesses the same each time."""

    def propose(self, request, context, budget):
        return Draft(token_ids=[int(context[-1])], parents=[-1])


def test_an_engine_drafts_in_the_same_passes_again() -> None:
    """Whatever it has done before: a resumed run begins with another past."""
    model, requests = tiny_policy().model, make_requests(4, group_size=2, max_tokens=40)
    found = []
    for warmed_up in (False, True):
        engine = Engine(model, drafter=Guess(), budget=FixedBudget(4))
        if warmed_up:
            sizes(engine, make_requests(3, group_size=2, max_tokens=7))
        engine.new_weights(5)
        records: list[PassRecord] = []
        engine.observers.append(records.append)
        sizes(engine, requests)
        found.append([each.asked > 0 for each in records])
    assert found[0] == found[1]
    assert 0 < found[0].count(False) < len(found[0]) / 4


def test_without_a_drafter_nothing_is_measured() -> None:
    assert Engine(tiny_policy().model, drafter=NoDrafter()).speedup is None


def test_the_time_between_passes_is_by_the_engines_clock() -> None:
    """On an emulated device it is not the machine's."""
    clock = iter([10.0, 12.0])
    meter = SpeedupMeter(1, now=lambda: next(clock))
    (request,) = make_requests(1, max_tokens=2)
    meter.submit([request])
    for _ in range(2):
        meter.note(a_pass(rows=1, asked=0, seen=9, seconds=0.5))
    output = Output(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(2), policy_versions=np.zeros(2, np.int32))
    meter.leave([Completion(request=request, output=replace(output, finish_reason="length"))])
    meter.report({})
    assert (meter._taken_s, meter._between_s) == (1.0, 1.5)
