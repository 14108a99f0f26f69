"""The matches that the history drafter votes with, and the tokens it looks at."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.drafts import Draft, DraftBatch, DraftSource
from rhymerl.history import HistoryStore
from rhymerl.testing import make_prompt
from rhymerl.types import Prompt
from tests.drafters.requests import completion, context, request, requests, resumed
from tests.history.answers import answer

PROMPT = make_prompt([1])
OWN, SIBLING, HISTORY = DraftSource.OWN, DraftSource.SIBLING, DraftSource.HISTORY

_NUMBERS = itertools.count()
Nodes = dict[tuple[int, ...], float]


def drafted(drafter: HistoryTreeDrafter, tokens: Sequence[int], *, budget: int = 32, prompt: Prompt = PROMPT) -> Draft:
    """Return the draft for a new request that has sampled these tokens."""
    new = request(prompt, name=f"request {next(_NUMBERS)}")
    drafter.start(new)
    return drafter.propose(new, context(new, tokens), budget)


def nodes(draft: Draft) -> Nodes:
    """Score by path."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True):
        paths.append(((*paths[parent], token)) if parent >= 0 else (token,))
    scores = [] if draft.scores is None else draft.scores.tolist()
    return dict(zip(paths, scores, strict=True))


def same(one: DraftBatch, two: DraftBatch) -> None:
    for name in ("token_ids", "parents", "starts", "scores", "match_length", "sources"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


# -- votes -------------------------------------------------------------------------------------------------------


def test_scores_by_hand(drafters):
    """Context 1 | 2, of which the 1 is the prompt. Three places follow a 2:

    epoch 0: 1 | 2 . 3 4         shares 1 2, weighs 0.5 (one epoch old)
    epoch 1: 1 | 2 . 5 7 2       shares 1 2, weighs 1
             1 | 2 5 7 2 . 6     shares 2 only, weighs 1 / 4 (one token shorter, length_weight 4)

    With escape 0.1 all weigh 1.85. After 3 there is one place, of 0.5, and so on; 6 has nothing below.
    """
    drafter = drafters(
        [answer(epoch=0, token_ids=[2, 3, 4]), answer(epoch=1, token_ids=[2, 5, 7, 2, 6])],
        own=False, siblings=False, length_weight=4.0, recency=0.5, escape=0.1,
    )  # fmt: skip
    draft = drafted(drafter, [2])
    five = 1 / 1.85
    expected = {
        (5,): five,
        (5, 7): five * (1 / 1.1),
        (5, 7, 2): five * (1 / 1.1) ** 2,
        (5, 7, 2, 6): five * (1 / 1.1) ** 3,
        (3,): 0.5 / 1.85,
        (3, 4): 0.5 / 1.85 * (0.5 / 0.6),
        (6,): 0.25 / 1.85,
    }
    assert nodes(draft) == pytest.approx(expected)
    assert list(nodes(draft)) == list(expected)  # the most probable first
    assert draft.match_length == 2
    assert draft.sources.tolist() == [HISTORY] * 4 + [HISTORY + 1] * 2 + [HISTORY]
    assert list(nodes(drafted(drafter, [2], budget=3))) == [(5,), (5, 7), (5, 7, 2)]


@pytest.mark.parametrize(("recency", "share"), [(1.0, 1 / 2), (0.5, 1 / 5)])
def test_recency_discounts_by_epochs(drafters, recency, share):
    """Weights 1 and recency ** 2."""
    history = [answer(epoch=3, token_ids=[5]), answer(epoch=1, token_ids=[6])]
    drafter = drafters(history, recency=recency, escape=0.0)
    assert nodes(drafted(drafter, []))[(6,)] == pytest.approx(share)


@pytest.mark.parametrize(("tilt", "share"), [(0.0, 1 / 2), (np.log(3) / 2, 3 / 4), (-np.log(3) / 2, 1 / 4)])
def test_the_tilt_favours_good_answers(drafters, tilt, share):
    """Weights exp(tilt) and exp(-tilt)."""
    history = [answer(sample=0, token_ids=[5], advantage=1.0), answer(sample=1, token_ids=[6], advantage=-1.0)]
    drafter = drafters(history, advantage_tilt=tilt, escape=0.0)
    assert nodes(drafted(drafter, []))[(5,)] == pytest.approx(share)


@pytest.mark.parametrize(
    ("max_branches", "priority", "expected"),
    [
        (1, "probability", {(5,): 2 / 3}),
        (1, "reward", {(6,): 1 / 3}),
        (2, "reward", {(5,): 2 / 3, (6,): 1 / 3}),
        (None, "reward", {(5,): 2 / 3, (6,): 1 / 3}),
    ],
)
def test_which_branches_stay(drafters, max_branches, priority, expected):
    """Two answers of reward 0.1 say 5, one of 0.9 says 6."""
    rewards, said = [0.1, 0.9, 0.1], [5, 6, 5]
    history = [answer(sample=s, token_ids=[said[s]], reward=rewards[s]) for s in range(3)]
    drafter = drafters(history, max_branches=max_branches, priority=priority, escape=0.0)
    assert nodes(drafted(drafter, [])) == pytest.approx(expected)


def test_equal_rewards_leave_it_to_the_votes(drafters):
    history = [answer(sample=s, token_ids=[5 + (s > 0)], reward=0.0) for s in range(3)]
    drafter = drafters(history, max_branches=1, priority="reward")
    assert list(nodes(drafted(drafter, []))) == [(6,)]


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        ({}, {5: 1 / 1.2, 6: 0.2 / 1.2}),
        ({"min_match": 2}, {5: 1.0}),
        ({"min_match": 3}, {}),
        ({"max_match": 1}, {5: 1 / 2, 6: 1 / 2}),
        ({"max_matches": 1}, {5: 1.0}),
        ({"length_weight": np.inf}, {5: 1.0}),
    ],
)
def test_which_matches_count(drafters, settings, lengths):
    """One answer says 5 after 3 4; the other says 6 after 9 4, which shares a token less."""
    history = [answer(sample=0, token_ids=[3, 4, 5]), answer(sample=1, token_ids=[9, 4, 6])]
    drafter = drafters(history, own=False, escape=0.0, **settings)
    draft = drafted(drafter, [8, 3, 4])
    assert nodes(draft) == pytest.approx({(token,): share for token, share in lengths.items()})
    assert draft.match_length == (0 if not lengths else settings.get("max_match", 2))


# -- whose tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sources"),
    [
        ({}, {5: OWN, 6: SIBLING, 7: HISTORY, 8: HISTORY + 1, 9: HISTORY + 4}),
        ({"own": False}, {6: SIBLING, 7: HISTORY, 8: HISTORY + 1, 9: HISTORY + 4}),
        ({"siblings": False}, {5: OWN, 7: HISTORY, 8: HISTORY + 1, 9: HISTORY + 4}),
        ({"window": 4}, {5: OWN, 6: SIBLING, 7: HISTORY, 8: HISTORY + 1}),
        ({"window": 1}, {5: OWN, 6: SIBLING, 7: HISTORY}),
        ({"window": 0}, {5: OWN, 6: SIBLING}),
        ({"window": 0, "own": False, "siblings": False}, {}),
    ],
)
def test_sources(drafters, settings, sources):
    history = [answer(epoch=epoch, token_ids=[2, token]) for epoch, token in [(0, 9), (3, 8), (4, 7)]]
    drafter = drafters(history, **settings)
    one, two = requests([1], 2)
    for each, tokens in [(one, [2, 6]), (two, [2, 5, 2])]:
        drafter.start(each)
        draft = drafter.propose(each, context(each, tokens), 9)
    below_root = draft.parents == -1
    found = [] if draft.sources is None else draft.sources[below_root].tolist()
    assert dict(zip(draft.token_ids[below_root].tolist(), found, strict=True)) == sources


def test_very_old_answers_are_drafted_from_too(drafters):
    """Sources are int8: an age beyond them must not turn into something else."""
    store, prompt = HistoryStore(window=1000), make_prompt([1])
    store.add(prompt, [answer(epoch=epoch, token_ids=[2, 3, 4]) for epoch in (0, 5, 900)])
    drafter = drafters(window=1000, recency=1.0)
    drafter.follow(store.snapshot())
    draft = drafted(drafter, [2], prompt=prompt)
    assert draft.token_ids.tolist() == [3, 4]
    drafter = drafters([answer(epoch=0, token_ids=[2, 3, 4]), answer(epoch=99, token_ids=[7])], window=1000)
    assert drafted(drafter, [2]).sources.tolist() == [HISTORY + 99] * 2


def test_a_request_goes_on_and_one_that_is_answered_anew_follows_its_former_self(drafters):
    drafter = drafters()
    (one,) = requests([1], 1)
    drafter.start(one)
    assert len(drafter.propose(one, context(one, [5, 6, 7]), 8)) == 0
    drafter.finish(completion(one, [5, 6, 7], "withdrawn"))

    on = resumed(one, [5, 6, 7])
    drafter.start(on)
    assert len(drafter.propose(on, context(on, [5, 6, 7]), 8)) == 0  # its own last tokens are no match
    assert drafter.propose(on, context(on, [5, 6, 7, 5]), 8).sources.tolist() == [OWN] * 3
    drafter.finish(completion(on, [5, 6, 7, 5], "withdrawn"))

    drafter.start(one)
    draft = drafter.propose(one, context(one, []), 8)
    assert (draft.token_ids.tolist(), draft.sources.tolist()) == ([5, 6, 7, 5], [SIBLING] * 4)
    draft = drafter.propose(one, context(one, [9, 6]), 8)
    assert (draft.token_ids.tolist(), draft.sources.tolist()) == ([7, 5], [SIBLING] * 2)
    drafter.finish(completion(one, [9, 6, 2]))


def test_splits_have_histories_of_their_own(drafters):
    drafter = drafters([answer(token_ids=[5])], split="train")
    train, validation = request(PROMPT), request(PROMPT, split="validation")
    drafter.start(train)
    drafter.start(validation)
    assert drafter.propose(train, context(train, [8, 1]), 8).token_ids.tolist()[:1] == [8]  # own: 1 8
    assert drafter.propose(validation, context(validation, []), 8).token_ids.tolist() == []
    assert drafter.propose(validation, context(validation, [8]), 8).token_ids.tolist() == []
    assert drafter.propose(train, context(train, [8, 1]), 8).sources.tolist().count(HISTORY) == 1


def test_two_prompts_under_one_key_do_not_meet(drafters):
    twin = Prompt(id="twin", key=PROMPT.key, token_ids=np.array([1, 4], np.int32), text="")
    drafter = drafters([answer(token_ids=[5, 6])])
    listed = [request(PROMPT), request(twin), request(twin, 1)]
    for each in listed:
        drafter.start(each)
    contexts = [context(each, tokens) for each, tokens in zip(listed, [[], [7, 8], [7]], strict=True)]
    batch = drafter.propose_batch(listed, contexts, [8, 8, 8])
    assert [batch.draft(r).token_ids.tolist() for r in range(3)] == [[5, 6], [], []]
    for each in listed:
        drafter.finish(completion(each, [2]))


# -- when indexes come -------------------------------------------------------------------------------------------


def test_without_deterministic_nobody_waits(drafters):
    drafter = drafters(deterministic=False)
    is_busy = threading.Event()
    drafter._history._submit(lambda: is_busy.wait(10))
    store = HistoryStore()
    store.add(PROMPT, [answer(token_ids=[5])])
    drafter.follow(store.snapshot())
    assert drafted(drafter, []).token_ids.tolist() == []
    is_busy.set()
    drafter.close()  # waits for what has been asked for, and forgets requests
    assert drafted(drafter, []).token_ids.tolist() == [5]


def test_with_deterministic_timing_changes_no_draft():
    """One of two waits for a slow thread at each step."""
    slow, fast = HistoryTreeDrafter(deterministic=True), HistoryTreeDrafter(deterministic=True)
    rng, store = np.random.default_rng(0), HistoryStore()
    prompts = [make_prompt([number, 1, 2]) for number in range(3)]
    for epoch in range(4):
        running = [request(prompt, sample) for prompt in prompts for sample in range(2)]
        answers = [rng.integers(0, 3, 12).tolist() for _ in running]
        for drafter in (slow, fast):
            for each in running:
                drafter.start(each)
        for done in range(0, 12, 3):
            contexts = [context(each, tokens[:done]) for each, tokens in zip(running, answers, strict=True)]
            same(*(each.propose_batch(running, contexts, [9] * len(running)) for each in (slow, fast)))
        version = store.version
        for drafter in (slow, fast):
            for each, tokens in zip(running, answers, strict=True):
                drafter.finish(completion(each, tokens))
        for each, tokens in zip(running, answers, strict=True):
            store.add(each.prompt, [answer(epoch=epoch, sample=each.sample, token_ids=tokens)])
        pause = threading.Event()
        slow._history._submit(lambda pause=pause: pause.wait(0.05))
        for drafter in (slow, fast):
            drafter.follow(store.deltas(version))
    slow.close()
    fast.close()


# -- batches -----------------------------------------------------------------------------------------------------


def test_a_batch_is_each_request_alone(drafters):
    rng = np.random.default_rng(1)
    prompts = [make_prompt([*rng.integers(0, 3, 4).tolist(), number]) for number in range(4)]
    drafter = drafters()
    store = HistoryStore()
    for prompt in prompts:
        store.add(prompt, [answer(token_ids=rng.integers(0, 3, 30), sample=sample) for sample in range(3)])
    drafter.follow(store.snapshot())
    running = [request(prompt, sample) for sample in range(3) for prompt in prompts]
    for each in running:
        drafter.start(each)
    contexts = [context(each, rng.integers(0, 3, 10).tolist()) for each in running]
    budgets = rng.integers(1, 20, len(running)).tolist()
    batch = drafter.propose_batch(running, contexts, budgets)
    assert (batch.counts <= budgets).all()
    assert batch.counts.tolist() == [min(20, budget) for budget in budgets]  # there is more than enough to say
    for r, each in enumerate(zip(running, contexts, budgets, strict=True)):
        one, alone = batch.draft(r), drafter.propose(*each)
        assert nodes(one) == nodes(alone)
        assert (one.match_length, one.sources.tolist()) == (alone.match_length, alone.sources.tolist())
        same(drafter.propose_batch(*([value] for value in each)), DraftBatch.pack([alone]))
    assert len(drafter.propose_batch([], [], [])) == 0


def test_answers_to_other_prompts_are_drafted_from_last():
    """One shared token in the prompt's own history against three elsewhere."""
    store = HistoryStore()
    store.add(make_prompt([9]), [answer(token_ids=[3, 4, 5, 6])])
    store.add(PROMPT, [answer(token_ids=[5, 7])])
    for others, length_weight, expected in ((0.0, 1.0, [7]), (0.1, 1.0, [7, 6]), (0.1, 5.0, [6, 7])):
        drafter = HistoryTreeDrafter(deterministic=True, others=others, length_weight=length_weight)
        drafter.follow(store.snapshot())
        draft = drafted(drafter, [3, 4, 5])
        assert draft.token_ids.tolist() == expected
        sources = [DraftSource.OTHER if token == 6 else HISTORY for token in expected]
        assert draft.sources.tolist() == sources
        drafter.close()


def test_the_first_epoch_is_drafted_from_other_prompts(drafters):
    drafter = drafters([answer(token_ids=[2, 3, 4])], prompt=make_prompt([9]), others=0.1)
    draft = drafted(drafter, [2])
    assert draft.token_ids.tolist() == [3, 4]
    assert draft.sources.tolist() == [DraftSource.OTHER] * 2
    drafter.follow(HistoryStore().snapshot())  # and no longer when all is forgotten
    assert len(drafted(drafter, [2])) == 0
