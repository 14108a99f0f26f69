"""Batches of drafts from more than one drafter: brought into the documented types, and laid side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.types import Draft, DraftBatch

if TYPE_CHECKING:
    from rhymerl.types import IndexArray

_NOTHING = Draft(token_ids=np.empty(0, np.int32), parents=np.empty(0, np.int32))


def tidied(drafts: DraftBatch, num_requests: int) -> DraftBatch:
    """A copy with arrays of the documented types, whatever sequences it came with.

    Raises ValueError when the arrays do not fit together, so that nobody's draft can be told.
    """
    fields = {name: np.asarray(getattr(drafts, name)) for name in ("token_ids", "parents", "scores", "sources")}
    starts, lengths = np.asarray(drafts.starts), {name: values.shape for name, values in fields.items()}
    total = fields["token_ids"].shape
    if starts.shape != (num_requests + 1,) or starts[0] != 0 or (np.diff(starts) < 0).any() or total != (starts[-1],):
        raise ValueError(f"starts must rise from 0 to {total} in {num_requests} steps, one a request")
    if len(set(lengths.values())) > 1:
        raise ValueError(f"arrays of different lengths: {lengths}")
    if np.shape(drafts.match_length) != (num_requests,):
        raise ValueError(
            f"match_length {np.shape(drafts.match_length)} must be as long as there are requests ({num_requests})"
        )
    for name in ("token_ids", "parents"):
        if total != (0,) and fields[name].dtype.kind not in "iu":
            raise ValueError(f"{name} ({fields[name].dtype}) must be integers")
    # Copies: the drafter may use its arrays again, and compiled code wants them writeable.
    return DraftBatch(
        token_ids=np.array(fields["token_ids"], np.int32),
        parents=np.array(fields["parents"], np.int32),
        starts=np.array(starts, np.int64),
        scores=np.array(fields["scores"], np.float64),
        match_length=np.array(drafts.match_length, np.int32),
        sources=np.array(fields["sources"], np.int8),
        problems=drafts.problems,
    )


def placed(drafts: DraftBatch, places: IndexArray, num_requests: int) -> DraftBatch:
    """What was proposed for the requests at the ascending `places` alone, nothing for the others of `num_requests`.

    A batch that does not fit together is a problem of each request that it was for.
    """
    try:
        drafts = tidied(drafts, len(places))
    except ValueError as error:
        nothing = DraftBatch.pack([_NOTHING] * len(places))
        drafts = replace(nothing, problems=dict.fromkeys(range(len(places)), str(error)))
    return drafts.spread(places, num_requests)


def merged(one: DraftBatch, other: DraftBatch) -> DraftBatch:
    """One batch of two over the same requests, of which each has nodes in one of them at most."""
    order = np.argsort(np.concatenate([one.requests, other.requests]), kind="stable")
    return DraftBatch(
        token_ids=np.concatenate([one.token_ids, other.token_ids])[order],
        parents=np.concatenate([one.parents, other.parents])[order],
        starts=one.starts + other.starts,
        scores=np.concatenate([one.scores, other.scores])[order],
        match_length=np.maximum(one.match_length, other.match_length),
        sources=np.concatenate([one.sources, other.sources])[order],
        problems={**one.problems, **other.problems},
    )
