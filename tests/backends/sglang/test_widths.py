"""Passes of several sizes inside SGLang: what the budget hears of them, and what is done in those without drafts."""

from __future__ import annotations

import numpy as np
import pytest

from rhymerl.backends.sglang.nodes import uniform
from rhymerl.backends.sglang.plugin.drafting import EngineDrafting, VerifiedPass
from rhymerl.backends.sglang.plugin.rows import EngineRow
from rhymerl.budgets import AIMDBudget, FixedBudget, UniformGoodputBudget
from rhymerl.drafts import Draft, DraftBatch
from rhymerl.testing import make_requests
from tests.backends.sglang.batches import Recorder, commit, fake, propose, run, step

WIDTHS = (0, 2, 4, 8)
CHEAP = [[0, 1.0], [1000, 1.01]]


class Spy(UniformGoodputBudget):
    """Writes down what it hears; takes the widths in turn, and leaves the drafter alone where one is None."""

    def __init__(self, schedule, widths=WIDTHS, **costs) -> None:
        super().__init__(widths, **costs)
        self.schedule = schedule
        self.passes, self.outcomes = 0, []

    def skips(self, num_requests):
        self.now = self.schedule[self.passes % len(self.schedule)]
        self.passes += 1
        return int(self.now is None)

    def limits(self, requests):
        return np.full(len(requests), self.now, np.int32)

    def trim(self, requests, drafts):
        return np.ones(len(drafts.token_ids), np.bool_)

    def learn(self, outcome):
        self.outcomes.append(outcome)


class Chains(Recorder):
    """Drafts what it takes for the rest of each answer."""

    def propose(self, request, context, budget):
        done = len(context) - len(request.prompt.token_ids)
        tokens = list(self.answers[request.id])[done : done + budget]
        scores = 0.95 ** np.arange(1.0, len(tokens) + 1)
        return Draft(token_ids=np.array(tokens, np.int32), parents=np.arange(-1, len(tokens) - 1), scores=scores)


@pytest.fixture(scope="module")
def problem():
    requests = make_requests(6, group_size=2, max_tokens=40, stop_token_ids=())
    source = np.random.default_rng(0)
    return requests, {request.id: source.integers(2, 19, 40).tolist() for request in requests}


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("schedule", [[8], [0], [None], [8, None, None, 2, 0, None, 4]], ids=str)
def test_answers_and_what_the_drafter_hears_are_those_of_any_sizes(problem, schedule, overlap):
    requests, answers = problem
    recorder = Recorder(answers)
    batch = [fake(request, answers[request.id]) for request in requests]
    run(EngineDrafting(recorder, Spy(schedule), vocabulary=19), batch, overlap=overlap)
    for request, asked in zip(requests, batch, strict=True):
        assert asked.output_ids[:40] == answers[request.id]
        told = recorder.told[request.id]
        assert [what[0] for what in told].count("start") == [what[0] for what in told].count("finish") == 1
        assert sum((what[1] for what in told if what[0] == "accept"), []) == answers[request.id]
        accepted = sum(what[2] for what in told if what[0] == "accept")
        assert (accepted > 5) == (max(each or 0 for each in schedule) > 0)


def test_tokens_are_not_waited_for_where_the_drafter_is_left_alone(problem):
    requests, answers = problem
    drafting = EngineDrafting(Chains(answers), Spy([2, None, None, 4]), vocabulary=19)
    batch = [fake(request, answers[request.id]) for request in requests]
    asked = []
    tokens = [[each.draw(0)] for each in batch]
    for _ in range(8):
        commit(batch, tokens)
        waits = []
        trees = drafting.propose(batch, lambda waits=waits: waits.append(1) or [()] * len(batch))
        asked.append((None if trees is None else trees.n - 1, len(waits)))
        tokens = [[each.draw(len(each.output_ids))] for each in batch]
    # A pass that had drafts is waited for, so that the budget hears of it: also by the next one, which has none.
    assert asked == 2 * [(2, 1), (None, 1), (None, 0), (4, 1)]


def test_the_budget_hears_what_came_of_each_pass_that_asked(problem):
    requests, answers = problem
    budget = Spy([8, 8, None, 4, 0])
    recorder = Recorder(answers)
    batch = [fake(request, answers[request.id]) for request in requests]
    run(EngineDrafting(recorder, budget, vocabulary=19), batch)
    accepted = sum(what[2] for told in recorder.told.values() for what in told if what[0] == "accept")
    assert sum(int(each.num_accepted.sum()) for each in budget.outcomes) == accepted > 30
    for each in budget.outcomes:
        rows = len(each.requests)
        assert (each.num_tokens - rows) % rows == 0
        assert (each.num_tokens - rows) // rows in WIDTHS
        assert each.num_padding == each.num_tokens - rows - len(each.drafts.token_ids) >= 0
        assert each.num_prompt_tokens == 0
        assert each.accepted.sum() == each.num_accepted.sum()
        assert (each.reached | ~each.accepted).all()
    assert any(each.num_padding for each in budget.outcomes)
    assert any(each.num_tokens == len(each.requests) for each in budget.outcomes), "a pass that was asked for nothing"


def test_how_long_a_pass_took_is_known_where_nothing_else_ran(problem):
    requests, answers = problem
    now = iter(range(1000))
    budget = Spy([2])
    drafting = EngineDrafting(Recorder(answers), budget, vocabulary=19, clock=lambda: float(next(now)))
    batch = [fake(request, answers[request.id]) for request in requests]
    tokens = [[each.draw(0)] for each in batch]
    for other in (False, True, False):
        commit(batch, tokens)
        tokens = step(drafting, batch, [()] * len(batch))
        if other:
            drafting.note_other_pass()
    commit(batch, tokens)
    propose(drafting, batch, [()] * len(batch))
    assert [(each.seconds is None, each.is_decoding) for each in budget.outcomes] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    assert all(each.seconds == 2.0 for each in budget.outcomes[::2])  # a draft is two looks at the clock


def verified_and_sampled(draft, sampled, width=8):
    """Return what came of a request's pass with that draft, in which these tokens were sampled."""
    (request,) = make_requests(1, max_tokens=20)
    asked = fake(request, [2] * 20)
    row = EngineRow.of(asked, width)
    asked.commit([2])
    row.follow(())
    verified = VerifiedPass(rows=[row], drafts=DraftBatch.pack([draft]), width=width, started=1.0)
    row.follow(sampled)
    return verified.outcome(3.5)


@pytest.mark.parametrize(
    ("sampled", "accepted", "reached"),
    [
        ([3, 6, 9], [0, 3], [0, 1, 2, 3, 4]),
        ([4, 9], [1], [0, 1]),
        ([9], [], [0, 1]),
        ([3, 5], [0, 2], [0, 1, 2, 3]),  # the last token that was wanted
        ([], [], []),  # it was put back into the queue: nothing is known
    ],
)
def test_what_was_reached_and_accepted(sampled, accepted, reached):
    """A root with children 3 and 4; 3 has 5 and 6, of which 6 has 7."""
    draft = Draft(token_ids=[3, 4, 5, 6, 7], parents=[-1, -1, 0, 0, 3])
    outcome = verified_and_sampled(draft, sampled)
    assert np.flatnonzero(outcome.accepted).tolist() == accepted
    assert np.flatnonzero(outcome.reached).tolist() == reached
    assert (outcome.num_accepted.tolist(), outcome.num_padding, outcome.seconds) == ([len(accepted)], 3, 2.5)


class Widths(EngineDrafting):
    """Writes down how many nodes each pass has."""

    def __init__(self, drafter, budget, **settings) -> None:
        super().__init__(drafter, budget, **settings)
        self.chosen = []

    def propose(self, requests, ahead):
        trees = super().propose(requests, ahead)
        self.chosen.append(0 if trees is None else trees.n - 1)
        return trees


@pytest.mark.parametrize("is_right", [True, False])
def test_drafts_that_hold_are_verified_and_others_given_up(problem, is_right):
    """A drafter that is always wrong costs a small share of the passes."""
    requests, answers = problem
    known = answers if is_right else {name: [(token + 5) % 19 for token in each] for name, each in answers.items()}
    drafting = Widths(Chains(known), UniformGoodputBudget(WIDTHS, costs=[[0, 1.0], [64, 2.0]]), vocabulary=19)
    for _ in range(8):
        run(drafting, [fake(request, answers[request.id]) for request in requests])
        drafting.flush()
    late = drafting.chosen[len(drafting.chosen) // 2 :]
    if is_right:
        assert np.median(late) == 8
    else:
        assert np.mean(np.array(late) > 0) < 0.1


def test_a_pass_has_the_smallest_width_that_holds_every_window(problem):
    """Three requests have right drafts and wider ones each time; those of the fourth are wrong."""
    requests, answers = problem
    known = {**answers, requests[0].id: [(token + 5) % 19 for token in answers[requests[0].id]]}
    drafting = Widths(Chains(known), uniform(AIMDBudget(8), 8), vocabulary=19)
    run(drafting, [fake(request, answers[request.id]) for request in requests[:4]])
    # Windows of 2, 4, 6 and 8: after passes of 3, 5, 7, 9 and 9 tokens a sixth ends the answers. The wrong one goes on
    # with its 2 nodes.
    assert drafting.chosen[:6] == [2, 4, 8, 8, 8, 8]
    assert set(drafting.chosen[6:30]) == {2}


def test_above_the_batch_size_of_aimd_no_pass_has_drafts(problem):
    requests, answers = problem
    drafting = Widths(Chains(answers), uniform(AIMDBudget(8, max_batch_size=3), 8), vocabulary=19)
    run(drafting, [fake(request, answers[request.id]) for request in requests[:4]])
    assert set(drafting.chosen) == {0}
    drafting = Widths(Chains(answers), uniform(AIMDBudget(8, max_batch_size=4), 8), vocabulary=19)
    run(drafting, [fake(request, answers[request.id]) for request in requests[:4]])
    assert max(drafting.chosen) == 8


def test_improbable_nodes_make_no_pass_wider(problem):
    """Scores are powers of 0.95: five nodes are above 0.75, two above 0.9, none above 0.96."""
    requests, answers = problem
    for least, width in ((0.0, 8), (0.75, 8), (0.9, 2), (0.96, 0)):
        drafting = Widths(Chains(answers), uniform(FixedBudget(8, min_probability=least), 8), vocabulary=19)
        run(drafting, [fake(request, answers[request.id]) for request in requests])
        assert set(drafting.chosen[:4]) == {width}
