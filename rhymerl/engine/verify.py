"""Lossless verification: draw the target's own token at a node, emit it, go on to the child that carries it.

All rows walk their trees side by side, one level at a time, so that draws are only made at nodes that are reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rhymerl.engine.layout import PassLayout
from rhymerl.engine.ragged import IndexArray
from rhymerl.engine.rows import Rows
from rhymerl.engine.sampler import Sampler
from rhymerl.engine.tree import Children

if TYPE_CHECKING:
    from rhymerl.types import BoolArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What a pass emitted. E = emitting rows (as in `PassLayout.emits`), T = tokens emitted, level by level."""

    emitter: IndexArray  # [T] which of the E
    level: IndexArray  # [T] 0 = drawn at the root
    place: IndexArray  # [T] the logits that the token was drawn from
    token: npt.NDArray[np.int32]  # [T]
    ended: BoolArray  # [E] the row has drawn a stop token
    num_emitted: IndexArray  # [E]
    num_accepted: IndexArray  # [E] emitted tokens that were drafted


def walk(layout: PassLayout, rows: Rows, sampler: Sampler) -> Walk:
    """Emit at least one token a row, up to its limit or its first stop token."""
    row = layout.row[layout.emits]
    position = rows.length[row] - rows.prompt_length[row]
    room = rows.limit[row] - rows.length[row]
    children = _children(layout)
    node = layout.logit_start.copy()
    active = np.arange(len(row))
    ended = np.zeros(len(row), np.bool_)
    num_emitted = np.zeros(len(row), np.int64)
    num_accepted = np.zeros(len(row), np.int64)
    levels: list[tuple[IndexArray, IndexArray, npt.NDArray[np.int32]]] = []
    while len(active):
        place = node[active]
        token = sampler.draw(place, row[active], position[active] + len(levels))
        levels.append((active, place, token))
        num_emitted[active] += 1
        ended[active] = (token[:, None] == rows.stop_ids[row[active]]).any(-1)
        child = children.find(place, token)
        num_accepted[active] += child >= 0
        goes_on = (child >= 0) & ~ended[active] & (num_emitted[active] < room[active])
        node[active[goes_on]] = child[goes_on]
        active = active[goes_on]
    return Walk(
        emitter=np.concatenate([level[0] for level in levels] or [active]),
        level=np.repeat(np.arange(len(levels)), [len(level[0]) for level in levels]),
        place=np.concatenate([level[1] for level in levels] or [active]),
        token=np.concatenate([level[2] for level in levels] or [active.astype(np.int32)]),
        ended=ended,
        num_emitted=num_emitted,
        num_accepted=num_accepted,
    )


def _children(layout: PassLayout) -> Children:
    """The edges of all drafts, in numbers of logits: a row's root is its first, its nodes follow in order."""
    if not layout.has_drafts:
        nothing = np.empty(0, np.int64)
        return Children(nothing, nothing, nothing.astype(np.int32))
    parents, nodes, tokens = [], [], []
    for start, member in zip(layout.logit_start, layout.emits, strict=True):
        draft = layout.drafts[member]
        if draft is not None and len(draft):
            parents.append(start + 1 + draft.parents.astype(np.int64))
            nodes.append(start + 1 + np.arange(len(draft)))
            tokens.append(draft.token_ids)
    return Children(np.concatenate(nodes), np.concatenate(parents), np.concatenate(tokens))
