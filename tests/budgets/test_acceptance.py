"""Calibration: what is said to be accepted is accepted as often."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rhymerl.budgets.acceptance import Acceptance
from rhymerl.drafts import Draft, DraftBatch, DraftSource
from tests.budgets.passes import chain, forest, outcome_of, parent_nodes

RATES = {0.1: 0.45, 0.5: 0.1, 0.9: 0.75}  # how often a node of that share is accepted: drafters may be quite wrong


def simulate(rng: np.random.Generator, drafts: DraftBatch, rates: np.ndarray) -> np.ndarray:
    """Chains only: a node is accepted with its rate, if its parent is."""
    accepted = rng.random(len(rates)) < rates
    for n, parent in enumerate(parent_nodes(drafts).tolist()):
        accepted[n] &= parent < 0 or accepted[parent]
    return accepted


def test_before_the_first_pass_scores_are_believed():
    drafts = DraftBatch.pack([chain(3, 0.8), chain(2, 0.25)])
    assert Acceptance().probabilities(drafts) == pytest.approx(drafts.scores, abs=0.06)


def test_nodes_without_scores_start_at_one_rate():
    assert Acceptance().probabilities(DraftBatch.pack([chain(3, None)])) == pytest.approx([0.6, 0.36, 0.216])


@pytest.mark.parametrize("length", [1, 3])
def test_shares_are_calibrated(length):
    rng, acceptance = np.random.default_rng(0), Acceptance()
    shares = list(RATES)
    seen = 0
    while seen < 2000:
        of = rng.choice(shares, 32)
        drafts = DraftBatch.pack([chain(length, share) for share in of])
        outcome = outcome_of(drafts, simulate(rng, drafts, np.repeat([RATES[share] for share in of], length)))
        acceptance.learn(drafts, outcome.reached, outcome.accepted)
        seen += int(outcome.reached.sum())
    drafts = DraftBatch.pack([chain(length, share) for share in shares])
    expected = np.concatenate([RATES[share] ** np.arange(1, length + 1) for share in shares])
    assert acceptance.probabilities(drafts) == pytest.approx(expected, abs=0.05)


def test_match_lengths_are_told_apart():
    rng, acceptance = np.random.default_rng(0), Acceptance()

    def drafts_of(lengths: list[int]) -> DraftBatch:
        return DraftBatch.pack(
            [Draft(token_ids=[5], parents=[-1], scores=[0.5], match_length=length) for length in lengths]
        )

    rates = {0: 0.1, 2: 0.3, 5: 0.6, 32: 0.95, 33: 0.5}
    for _ in range(2000 // 8):
        drafts = drafts_of(list(rates) * 2)
        accepted = rng.random(10) < np.tile(list(rates.values()), 2)
        acceptance.learn(drafts, np.ones(10, np.bool_), accepted)
    assert acceptance.probabilities(drafts_of(list(rates))) == pytest.approx(list(rates.values()), abs=0.05)


def test_depths_are_calibrated_where_there_are_no_scores():
    rng, acceptance = np.random.default_rng(0), Acceptance()
    rates = np.array([0.9, 0.5, 0.7])
    seen = 0
    while seen < 2000:
        drafts = DraftBatch.pack([chain(3, None)] * 16)
        outcome = outcome_of(drafts, simulate(rng, drafts, np.tile(rates, 16)))
        acceptance.learn(drafts, outcome.reached, outcome.accepted)
        seen += int(outcome.reached.sum())
    assert acceptance.probabilities(DraftBatch.pack([chain(3, None)])) == pytest.approx(rates.cumprod(), abs=0.05)


def test_sources_are_told_apart():
    """And the ages of history, where bins are the same."""
    rng, acceptance = np.random.default_rng(0), Acceptance()
    rates = {DraftSource.OWN: 0.2, DraftSource.SIBLING: 0.7, DraftSource.HISTORY: 0.8, DraftSource.HISTORY + 2: 0.4}
    drafts = DraftBatch.pack(
        [Draft(token_ids=[5], parents=[-1], scores=[0.6], sources=[int(source)]) for source in [*rates] * 4]
    )
    for _ in range(1000):
        accepted = rng.random(len(drafts)) < np.tile(list(rates.values()), 4)
        acceptance.learn(drafts, np.ones(len(drafts), np.bool_), accepted)
    found = acceptance.probabilities(drafts)
    assert found[: len(rates)] == pytest.approx(list(rates.values()), abs=0.08)
    again = Acceptance()
    again.load_state_dict(json.loads(json.dumps(acceptance.state_dict())))
    assert again.probabilities(drafts).tolist() == found.tolist()


def test_a_policy_that_changes_is_followed():
    acceptance, drafts = Acceptance(), DraftBatch.pack([chain(1, 0.5)] * 64)
    for accepted in [True] * 100 + [False] * 100:
        acceptance.learn(drafts, np.ones(64, np.bool_), np.full(64, accepted))
    assert acceptance.probabilities(drafts)[0] < 0.15


@pytest.mark.parametrize("scored", [True, False])
def test_probabilities_never_grow_along_a_path(scored):
    rng, acceptance = np.random.default_rng(0), Acceptance()
    for _ in range(30):
        drafts = forest(rng, 4, most=12, scored=scored)
        probabilities, parent = acceptance.probabilities(drafts), parent_nodes(drafts)
        assert ((probabilities > 0) & (probabilities < 1)).all()
        assert (probabilities <= np.where(parent >= 0, probabilities[parent], 1.0)).all()
        accepted = rng.random(len(parent)) < 0.5
        acceptance.learn(drafts, accepted | (parent < 0), accepted)


@pytest.mark.parametrize("scores", [[0.0, 0.0], [1.0, 2.0], [np.nan, 0.5], [0.5, np.nan], [-1.0, 1e300]])
def test_odd_scores_do_no_harm(scores):
    drafts = DraftBatch.pack([Draft(token_ids=[5, 6], parents=[-1, 0], scores=scores), chain(0)])
    acceptance = Acceptance()
    acceptance.learn(drafts, np.array([True, True]), np.array([True, False]))
    probabilities = acceptance.probabilities(drafts)
    assert 0 < probabilities[1] < probabilities[0] < 1


def test_nothing_drafted():
    acceptance, drafts = Acceptance(), DraftBatch.pack([chain(0)] * 2)
    acceptance.learn(drafts, np.empty(0, np.bool_), np.empty(0, np.bool_))
    assert acceptance.probabilities(drafts).tolist() == []


def test_counts_of_a_version_with_other_sources_are_left_out():
    acceptance = Acceptance()
    state = acceptance.state_dict()
    acceptance.load_state_dict({**state, "of_source": [[9.0], [9.0]]})
    assert acceptance.state_dict() == state
