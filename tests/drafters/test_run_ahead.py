"""Drafts from prefetched tokens against what they should be by definition, and whose turn it is otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.config import describe, instantiate
from rhymerl.drafters import Drafter, HistoryTreeDrafter, NGramDrafter, NoDrafter, RunAheadDrafter
from rhymerl.drafters.wrapped import listens
from rhymerl.drafts import Draft, DraftBatch, DraftSource
from rhymerl.history.index import REACH
from rhymerl.testing import make_prompt
from rhymerl.types import RolloutRequest
from tests.drafters.requests import completion, context, request, resumed

few = st.integers(0, 1)


class Fork(Drafter):
    """Two siblings, the request's sample number and the next, scored and traceable; notes what it is told and asked."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def propose(self, request, context, budget):
        tokens = [request.sample, request.sample + 1][:budget]
        return Draft(
            token_ids=np.array(tokens, np.int32),
            parents=np.full(len(tokens), -1, np.int32),
            scores=np.full(len(tokens), 0.25),
            match_length=len(context),
            sources=np.full(len(tokens), DraftSource.OWN, np.int32),
        )

    def propose_batch(self, requests, contexts, budgets):
        self.told.append(("asked", [each.sample for each in requests], list(budgets)))
        return super().propose_batch(requests, contexts, budgets)

    def catch_up(self):
        self.told.append(("catch_up",))

    def start(self, request):
        self.told.append(("start", request))

    def accept(self, request, token_ids, num_accepted):
        self.told.append(("accept", request, token_ids, num_accepted))

    def finish(self, completion):
        self.told.append(("finish", completion))

    def learn(self, samples):
        self.told.append(("learn", samples))

    def follow(self, delta):
        self.told.append(("follow", delta))

    def close(self):
        self.told.append(("close",))


def asking(sample: int, ahead: Sequence[int] | None, *, prompt: Sequence[int] = (7, 8)) -> RolloutRequest:
    tokens = None if ahead is None else np.array(ahead, np.int32)
    return replace(request(make_prompt(prompt), sample), prefetched=tokens)


def expected(asked: RolloutRequest, response: Sequence[int], budget: int, inner: Drafter) -> Draft:
    """Return the draft by definition, without any memory."""
    ahead = [] if asked.prefetched is None else asked.prefetched.tolist()
    rest = ahead[len(response) :][:budget]
    wrong = [at for at, (one, other) in enumerate(zip(ahead, response, strict=False)) if one != other]
    agreed = len(response) - 1 - wrong[-1] if wrong else len(response)
    if not rest or (wrong and agreed < 3):
        return inner.propose(asked, context(asked, response), budget)
    return Draft(
        token_ids=np.array(rest, np.int32),
        parents=np.arange(-1, len(rest) - 1, dtype=np.int32),
        scores=0.95 ** np.arange(1.0, len(rest) + 1),
        match_length=REACH + 1 + (min(agreed, 15) if wrong else 16 + len(response)),
        sources=np.full(len(rest), DraftSource.RUN_AHEAD, np.int32),
    )


def same(one: Draft, two: Draft) -> None:
    for name in ("token_ids", "parents", "scores", "match_length", "sources"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


answers = st.lists(
    st.tuples(
        st.one_of(st.none(), st.lists(few, max_size=12)),  # ahead
        st.lists(st.lists(few, max_size=3), min_size=1, max_size=4),  # what each pass draws
        st.integers(1, 5),  # budget
    ),
    min_size=1,
    max_size=5,
)


@given(answers=answers)
def test_what_comes_next_while_the_whole_response_agrees_and_else_the_inner_draft(answers):
    inner = Fork()
    drafter = RunAheadDrafter(inner)
    requests = [asking(sample, ahead) for sample, (ahead, _, _) in enumerate(answers)]
    responses = [list[int]() for _ in answers]
    for each in requests:
        drafter.start(each)
    for number in range(max(len(passes) for _, passes, _ in answers)):
        for response, (_, passes, _) in zip(responses, answers, strict=True):
            response += passes[number] if number < len(passes) else []
        contexts = [context(each, response) for each, response in zip(requests, responses, strict=True)]
        inner.told.clear()
        batch = drafter.propose_batch(requests, contexts, [budget for _, _, budget in answers])
        wanted = [
            expected(each, response, budget, inner)
            for each, response, (_, _, budget) in zip(requests, responses, answers, strict=True)
        ]
        for r, draft in enumerate(wanted):
            same(batch.draft(r), draft)
        theirs = [r for r, draft in enumerate(wanted) if DraftSource.OWN in draft.sources]
        assert inner.told == ([("asked", theirs, [answers[r][2] for r in theirs])] if theirs else [])
    for each, response in zip(requests, responses, strict=True):
        drafter.finish(completion(each, response))
    assert drafter._prefetched == {}


def test_only_new_tokens_are_looked_at():
    drafter, ahead = RunAheadDrafter(NoDrafter()), np.arange(1000, dtype=np.int32)
    asked = replace(asking(0, []), prefetched=ahead)
    drafter.start(asked)
    response = ahead.tolist()
    assert len(drafter.propose(asked, context(asked, response[:600]), 9)) == 9
    ahead[:600] = -1
    assert drafter.propose(asked, context(asked, response[:700]), 9).token_ids.tolist() == list(range(700, 709))


def test_a_request_that_goes_on_from_tokens_agrees_with_all_of_them():
    drafter = RunAheadDrafter(NoDrafter())
    for name, brings, draft in (("right", [1, 2], [3, 4]), ("wrong", [1, 3], []), ("all", [1, 2, 3, 4], [])):
        asked = replace(resumed(asking(0, [1, 2, 3, 4]), brings), id=name)
        drafter.start(asked)
        assert drafter.propose(asked, context(asked, brings), 9).token_ids.tolist() == draft


def test_who_starts_again_is_drafted_for_again():
    """The request was withdrawn, perhaps by an update that drew something else."""
    drafter, asked = RunAheadDrafter(NoDrafter()), asking(0, [1, 2, 3])
    for response, draft in (([], [1, 2, 3]), ([5], []), ([1], [2, 3])):
        drafter.start(asked)
        assert drafter.propose(asked, context(asked, response), 9).token_ids.tolist() == draft
        drafter.finish(completion(asked, response, "withdrawn"))


def test_everything_is_passed_on():
    inner = Fork()
    drafter, asked = RunAheadDrafter(inner), asking(0, [1, 2])
    tokens, ended, samples, delta = np.array([1, 5], np.int32), completion(asked, [1, 5]), [object()], object()
    drafter.start(asked)
    drafter.accept(asked, tokens, 1)
    drafter.finish(ended)
    drafter.learn(samples)
    drafter.follow(delta)
    drafter.start(asked)
    drafter.catch_up()
    drafter.close()
    assert drafter._prefetched == {}
    heard = ["start", "accept", "finish", "learn", "follow", "start", "catch_up", "close"]
    assert [what[0] for what in inner.told] == heard
    assert inner.told[1] == ("accept", asked, tokens, 1)
    assert (inner.told[0][1], inner.told[2][1], inner.told[3][1], inner.told[4][1]) == (asked, ended, samples, delta)


@pytest.mark.parametrize("inner", [NoDrafter(), NGramDrafter(), HistoryTreeDrafter(deterministic=True)])
def test_any_drafter_may_be_inside(inner):
    drafter = RunAheadDrafter(inner)
    requests = [asking(0, [4, 5, 6]), asking(1, None), asking(2, [9]), asking(3, [])]
    for each in requests:
        drafter.start(each)
    response = [4, 7, 8, 7]
    contexts = [context(requests[0], [4]), *(context(each, response) for each in requests[1:])]
    batch = drafter.propose_batch(requests, contexts, [4] * 4)
    alone = inner.propose_batch(requests[1:], contexts[1:], [4] * 3)
    assert batch.draft(0).token_ids.tolist() == [5, 6]
    for r in range(3):
        same(batch.draft(r + 1), alone.draft(r))
    drafter.close()


class Wrong(NoDrafter):
    """A batch of lists that fit together, or not; request 1 of it has a draft that cannot be packed."""

    def __init__(self, *, fits: bool) -> None:
        self.fits = fits

    def propose_batch(self, requests, contexts, budgets):
        packed = DraftBatch.pack([Draft(token_ids=[3], parents=[-1])] * len(requests))
        lists = {name: getattr(packed, name).tolist() for name in ("token_ids", "parents", "scores", "sources")}
        starts = packed.starts.tolist() if self.fits else [0]
        return replace(packed, **lists, starts=starts, problems={1: "no list"} if self.fits else {})


@pytest.mark.parametrize("fits", [True, False])
def test_what_is_wrong_with_an_inner_batch_is_told_of_those_it_was_for(fits):
    drafter = RunAheadDrafter(Wrong(fits=fits))
    requests = [asking(0, None), asking(1, [5]), asking(2, None)]
    for each in requests:
        drafter.start(each)
    batch = drafter.propose_batch(requests, [context(each, []) for each in requests], [4] * 3)
    assert batch.draft(1).token_ids.tolist() == [5]
    if fits:
        assert batch.problems == {2: "no list"}
        assert batch.draft(0).token_ids.tolist() == [3]
    else:
        assert batch.problems.keys() == {0, 2}
        assert "starts must rise" in batch.problems[0]
        assert batch.counts.tolist() == [0, 1, 0]


def test_a_hook_that_is_only_passed_on_is_none():
    assert listens(Fork(), "accept")
    assert listens(RunAheadDrafter(RunAheadDrafter(Fork())), "accept")
    assert not listens(RunAheadDrafter(NGramDrafter()), "accept")
    assert not listens(NoDrafter(), "learn")


def test_it_is_built_again_from_its_settings():
    drafter = RunAheadDrafter(HistoryTreeDrafter(window=3))
    described = describe(drafter)
    assert described["inner"]["window"] == 3
    again = instantiate(described, key="drafter")
    assert describe(again) == described
    assert isinstance(again.inner, HistoryTreeDrafter)
