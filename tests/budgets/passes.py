"""Drafts, and what comes of them, for the tests of budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rhymerl.budgets import GoodputBudget, PassOutcome
from rhymerl.budgets.base import Pauses
from rhymerl.drafts import Draft, DraftBatch, closed, keep_nodes
from rhymerl.testing import make_requests
from rhymerl.types import RolloutRequest


def chain(length: int, score: float | None = 0.5) -> Draft:
    """A path whose nodes have each `score` times the probability of the one before; None gives no scores."""
    scores = None if score is None else score ** np.arange(1.0, length + 1)
    return Draft(token_ids=np.arange(length), parents=np.arange(-1, length - 1), scores=scores)


def forest(rng: np.random.Generator, num_requests: int, *, most: int = 4, scored: bool = True) -> DraftBatch:
    """Random trees; children share what their parent has."""
    drafts = []
    for _ in range(num_requests):
        parents: list[int] = []
        left, scores = {-1: 1.0}, []
        for node in range(int(rng.integers(0, most + 1))):
            parents.append(int(rng.integers(-1, node)))
            scores.append(left[parents[-1]] * float(rng.uniform(0.05, 0.95)))
            left[parents[-1]] -= scores[-1]
            left[node] = scores[-1]
        drafts.append(
            Draft(
                token_ids=np.arange(len(parents)),
                parents=np.array(parents, np.int32),
                scores=scores if scored else None,
            )
        )
    return DraftBatch.pack(drafts)


def parent_nodes(drafts: DraftBatch) -> np.ndarray:
    """Each node's parent counted through the whole batch, [N], -1 = directly after the context."""
    return np.where(drafts.parents < 0, -1, drafts.starts[drafts.requests] + drafts.parents)


def outcome_of(
    drafts: DraftBatch,
    accepted: np.ndarray | None = None,
    *,
    seconds: float = 1.0,
    requests: Sequence[RolloutRequest] | None = None,
) -> PassOutcome:
    """Return an outcome, by default with nothing accepted; siblings and children of accepted nodes are reached."""
    accepted = np.zeros(len(drafts.token_ids), np.bool_) if accepted is None else np.asarray(accepted, np.bool_)
    parent = parent_nodes(drafts)
    return PassOutcome(
        requests=make_requests(len(drafts)) if requests is None else requests,
        drafts=drafts,
        reached=(parent < 0) | accepted[parent],
        accepted=accepted,
        num_accepted=np.bincount(drafts.requests[accepted], minlength=len(drafts)),
        num_tokens=len(drafts) + len(drafts.token_ids),
        num_rows=len(drafts),
        seconds=seconds,
        is_decoding=True,
    )


Propose = Callable[[list[int]], list[Draft]]  # limits of those who are asked -> their drafts


def passes(
    budget: GoodputBudget,
    number: int,
    *,
    rows: int,
    propose: Propose,
    is_right: Callable[[np.ndarray], np.ndarray] = np.zeros_like,
    seconds: Callable[[int, int], float] = lambda nodes, asked: 1.0,
) -> list[tuple[int, int]]:
    """So many passes as the engine makes them; requests asked for and nodes verified in each."""
    requests, found, pauses = make_requests(rows), [], Pauses(budget.skips, budget.count_passes)
    for _ in range(number):
        if pauses.take(rows):
            found.append((0, 0))
            continue
        limits = budget.limits(requests)
        askers = np.flatnonzero(limits)
        drafts = DraftBatch.pack([chain(0)] * rows)
        if len(askers):
            drafts = DraftBatch.pack(propose(limits[askers].tolist()))
            drafts = keep_nodes(drafts, budget.trim([requests[asker] for asker in askers], drafts)).scatter(
                askers, rows
            )
        accepted = closed(drafts, is_right(np.ones(len(drafts.token_ids))).astype(np.bool_))
        taken = seconds(len(drafts.token_ids), len(askers))
        budget.learn(outcome_of(drafts, accepted, seconds=taken, requests=requests))
        found.append((len(askers), len(drafts.token_ids)))
    return found


def guesses(length: int, score: float | None = 0.3) -> Propose:
    return lambda limits: [chain(min(length, limit), score) for limit in limits]
