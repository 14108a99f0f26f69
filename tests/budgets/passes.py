"""Drafts, and what comes of them, for the tests of budgets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rhymerl.budgets import PassOutcome
from rhymerl.drafts import Draft, DraftBatch
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
