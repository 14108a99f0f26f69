"""Lossless verification: sample the target's own token at a node, emit it, go on to the child that carries it.

Every row walks its tree as far as tokens have been sampled. Where logits are few, all are sampled from at once; else
only those at nodes that are reached, all rows side by side, one level at a time.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rhymerl.compiled import compiled
from rhymerl.engine.layout import PassLayout
from rhymerl.engine.rows import Rows
from rhymerl.engine.sampler import Sampler
from rhymerl.types import BoolArray, FloatArray, IndexArray, IntArray

_ROOT, _DONE = -1, -2  # where a row stands, when it is at none of its nodes


class Verification(NamedTuple):
    """The tokens of a pass. E = emitting rows (`PassLayout.emits`), M = their logits, K = nodes, T = tokens emitted."""

    indices: IndexArray  # [T] the logits that each token was sampled from, row by row
    emitter: IndexArray  # [T] which of the E
    token: npt.NDArray[np.int32]  # [T]
    ended: BoolArray  # [E] the row has sampled a stop token
    num_emitted: IndexArray  # [E]
    num_accepted: IndexArray  # [E] emitted tokens that were drafted
    sampled_at: BoolArray  # [M] the row came there and sampled
    accepted: BoolArray  # [K] the node became a token; nothing is sampled at one that ends the row


def verify(layout: PassLayout, rows: Rows, sampler: Sampler) -> Verification:
    """Emit at least one token a row, up to its limit or its first stop token."""
    row, drafts = layout.emitting, layout.drafts
    position = rows.length[row] - rows.prompt_length[row]
    sampled = np.full(len(layout.logit_row), -1, np.int32)
    num_emitted, num_accepted = np.zeros((2, len(row)), np.int64)
    walk = _Walk(
        stands_at=np.full(len(row), _ROOT, np.int64),
        num_emitted=num_emitted,
        num_accepted=num_accepted,
        ended=np.zeros(len(row), np.bool_),
        sampled_at=np.zeros(len(sampled), np.bool_),
        accepted=np.zeros(len(drafts.parents), np.bool_),
    )
    ends = _Ends(rows.stop_ids, rows.length, rows.limit)
    wanted = np.arange(len(sampled)) if sampler.draws_ahead else layout.logit_start
    while len(wanted):
        owner = layout.logit_row[wanted]
        sampled[wanted] = sampler.draw(wanted, row[owner], position[owner] + layout.logit_level[wanted])
        _accept(sampled, drafts.token_ids, drafts.parents, drafts.starts, row, ends, walk)
        if sampler.draws_ahead:
            break
        standing = np.flatnonzero(walk.stands_at != _DONE)
        wanted = layout.logit_start[standing] + 1 + walk.stands_at[standing]
    index = np.flatnonzero(walk.sampled_at)
    return Verification(
        indices=index,
        emitter=layout.logit_row[index],
        token=sampled[index],
        ended=walk.ended,
        num_emitted=walk.num_emitted,
        num_accepted=walk.num_accepted,
        sampled_at=walk.sampled_at,
        accepted=walk.accepted,
    )


class _Ends(NamedTuple):
    """What `Rows` has of all rows that ends an answer."""

    stop_ids: npt.NDArray[np.int32]
    length: IndexArray
    limit: IndexArray


class _Walk(NamedTuple):
    """The way of each row down its tree so far; but for where it stands as `Verification` has it."""

    stands_at: IndexArray  # [E] a node of its own, _ROOT or _DONE
    num_emitted: IndexArray
    num_accepted: IndexArray
    ended: BoolArray
    sampled_at: BoolArray
    accepted: BoolArray


@compiled
def _accept(
    sampled: IntArray,
    token_ids: IntArray,
    parents: IntArray,
    starts: IndexArray,
    row: IndexArray,
    ends: _Ends,
    walk: _Walk,
) -> None:
    """Accept each node whose token was sampled at its parent, up to where nothing is sampled yet (sampled[M] < 0).

    `walk.py` has the rule for tokens that are all known.
    """
    # A node has three indices. `here` and the values of `parents` count a row's own nodes from 0; its root is -1.
    # Logits [M] are those of each row's root and then of its nodes, row by row: in front of those of node `here` of
    # row e stand the `first` nodes of earlier rows, e + 1 roots, and `here` nodes of its own. The third index, in the
    # packed pass [N], is what `PassLayout.logit_indices` has; nothing here needs it.
    for e in range(len(walk.stands_at)):
        first, end, here = starts[e], starts[e + 1], walk.stands_at[e]
        room = ends.limit[row[e]] - ends.length[row[e]]
        while here != _DONE:
            index = first + e + 1 + here
            token = sampled[index]
            if token < 0:
                break
            walk.sampled_at[index] = True
            walk.num_emitted[e] += 1
            for stop in ends.stop_ids[row[e]]:
                walk.ended[e] |= stop == token
            child = _DONE
            for node in range(first + here + 1, end):  # children come after their parent
                if parents[node] == here and token_ids[node] == token:
                    child = node - first
                    walk.accepted[node] = True
                    walk.num_accepted[e] += 1
                    break
            here = _DONE if walk.ended[e] or walk.num_emitted[e] >= room else child
        walk.stands_at[e] = here


def commit(layout: PassLayout, rows: Rows, verified: Verification, logprobs: FloatArray, policy_version: int) -> None:
    """Write the tokens, with their log-probs [T], to their rows.

    Nodes at which something was sampled are cached now; the slots of all others go back.
    """
    freed = np.empty(len(layout.node_index), np.int64)
    drafts = layout.drafts
    num_freed = _commit(
        _Written(*_written(rows)),
        *(layout.row, layout.chain, layout.emitting),
        verified,
        logprobs,
        policy_version,
        drafts.starts,
        drafts.sources,
        *(layout.node_depth, layout.slots[layout.node_index], freed),
    )
    rows.pool.give(freed[:num_freed])


class _Written(NamedTuple):
    """What `Rows` has of all rows, as far as a pass changes it."""

    tokens: IntArray
    logprobs: FloatArray
    versions: IntArray
    sources: npt.NDArray[np.int8]
    slots: IndexArray
    length: IndexArray
    cached: IndexArray
    passes: IndexArray
    drafted: IndexArray
    accepted: IndexArray


_written = attrgetter(*_Written._fields)


@compiled
def _commit(
    rows: _Written,
    fed: IndexArray,
    chain: IndexArray,
    row: IndexArray,
    verified: Verification,
    logprobs: FloatArray,
    policy_version: int,
    starts: IndexArray,
    sources: npt.NDArray[np.int8],
    depths: IndexArray,
    slots: IndexArray,
    freed: IndexArray,
) -> int:
    """Returns how many slots it has written to `freed`."""
    for f in range(len(fed)):
        rows.cached[fed[f]] += chain[f]
    t = num_freed = 0
    for e in range(len(row)):
        r = row[e]
        start, root = rows.length[r], rows.cached[r] - 1
        for at in range(start, start + verified.num_emitted[e]):
            rows.tokens[r, at], rows.logprobs[r, at], rows.versions[r, at] = (
                verified.token[t],
                logprobs[t],
                policy_version,
            )
            t += 1
        for node in range(starts[e], starts[e + 1]):
            if verified.accepted[node]:
                rows.sources[r, start + depths[node] - 1] = sources[node]
            if verified.sampled_at[node + e + 1]:
                rows.slots[r, root + depths[node]] = slots[node]
                rows.cached[r] += 1
            else:
                freed[num_freed] = slots[node]
                num_freed += 1
        rows.length[r] += verified.num_emitted[e]
        rows.passes[r] += 1
        rows.drafted[r] += starts[e + 1] - starts[e]
        rows.accepted[r] += verified.num_accepted[e]
    return num_freed
