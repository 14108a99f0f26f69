"""From rows to one forward pass: which tokens are fed, where they stand, what they may see.

A row feeds its uncached tokens as a chain and hangs its draft below the last of them, the root. Prefill,
plain decoding and tree verification are the same thing with other counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.engine.narrow import MAX_WIDTH, NarrowLayout
from rhymerl.engine.ragged import IndexArray, Ragged, ragged
from rhymerl.engine.rows import Rows
from rhymerl.engine.tree import ancestors, depths
from rhymerl.types import Draft

if TYPE_CHECKING:
    from rhymerl.types import BoolArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """Rows of like width: what attention gathers. B rows, Q queries, S keys."""

    kv_slots: IndexArray  # [B, S]
    mask: BoolArray  # [B, Q, S]
    queries: IndexArray  # [B, Q] places in the packed pass
    valid: BoolArray  # [B, Q]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLayout:
    """One packed pass over N tokens of the rows `row` [F], the feeding ones."""

    row: IndexArray  # [F]
    chain: IndexArray  # [F] committed tokens fed
    drafts: Sequence[Draft | None]  # [F]
    fed: Ragged  # chain + draft nodes of every feeding row
    token_ids: IntArray  # [N]
    positions: IndexArray  # [N]
    slots: IndexArray  # [N] where keys and values go
    emits: IndexArray  # [E] which of the F rows end in a root
    logit_places: IndexArray  # [M] tokens whose logits are needed: every root, then its draft nodes
    logit_start: IndexArray  # [E] where each emitting row's logits begin
    buckets: list[BucketLayout]
    narrow: NarrowLayout | None  # rows that the compiled attention takes

    @property
    def has_drafts(self) -> bool:
        """Whether any row hangs a draft below its root."""
        return len(self.logit_places) > len(self.emits)


def lay_out(
    rows: Rows, row: IndexArray, chain: IndexArray, drafts: Sequence[Draft | None], *, compiled: bool = False
) -> PassLayout:
    """Take slots for all fed tokens and describe the pass. The caller has checked that there are enough slots.

    With `compiled` narrow rows are laid out for engine/narrow.py, and only the wide ones go into buckets.

    Prefix rows come before the rows that read them; a row's draft is None (nothing) unless its chain is complete.
    """
    num_nodes = np.array([len(draft) if draft is not None else 0 for draft in drafts], np.int64)
    fed = ragged(chain + num_nodes)
    of_row, in_chain = row[fed.row], fed.offset < chain[fed.row]
    place = rows.cached[of_row] + fed.offset
    slots = rows.pool.take(fed.total)
    rows.slots[of_row, place] = slots
    for each in row[rows.is_request[row] & (rows.shared[row] > 0) & (rows.cached[row] == rows.shared[row])]:
        rows.read_prefix(int(each))

    token_ids = np.empty(fed.total, np.int32)
    token_ids[in_chain] = rows.tokens[of_row[in_chain], place[in_chain]]
    positions = place.copy()
    live = [draft for draft in drafts if draft is not None and len(draft)]
    if live:
        token_ids[~in_chain] = np.concatenate([draft.token_ids for draft in live])
        depth = np.concatenate([depths(draft.parents) for draft in live])
        positions[~in_chain] = (rows.cached[row] + chain - 1)[fed.row[~in_chain]] + depth

    emits = np.flatnonzero(rows.is_request[row] & (rows.cached[row] + chain == rows.length[row]))
    wanted = ragged(1 + num_nodes[emits])
    is_narrow = chain + num_nodes <= (MAX_WIDTH if compiled else 0)
    narrow = np.flatnonzero(is_narrow)
    return PassLayout(
        row=row,
        chain=chain,
        drafts=drafts,
        fed=fed,
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        emits=emits,
        logit_places=(fed.start + chain - 1)[emits][wanted.row] + wanted.offset,
        logit_start=wanted.start,
        buckets=_buckets(rows, row, chain, num_nodes, drafts, fed, np.flatnonzero(~is_narrow)),
        narrow=_narrow(rows, row, chain, drafts, fed, slots, narrow) if len(narrow) else None,
    )


def _buckets(
    rows: Rows,
    row: IndexArray,
    chain: IndexArray,
    num_nodes: IndexArray,
    drafts: Sequence[Draft | None],
    fed: Ragged,
    members: IndexArray,
) -> list[BucketLayout]:
    """Rows whose widths share a power of two go together, so padding at most doubles a row."""
    if not len(members):
        return []
    width = chain + num_nodes
    size_class = np.ceil(np.log2(width[members])).astype(np.int64)
    return [
        _bucket(rows, row, chain, width, drafts, fed, members[size_class == each]) for each in np.unique(size_class)
    ]


def _narrow(
    rows: Rows,
    row: IndexArray,
    chain: IndexArray,
    drafts: Sequence[Draft | None],
    fed: Ragged,
    slots: IndexArray,
    members: IndexArray,
) -> NarrowLayout:
    parent = np.full(fed.total, -1, np.int64)
    is_node = fed.offset >= chain[fed.row]
    for i in np.unique(fed.row[is_node]):
        draft = drafts[i]
        assert draft is not None
        first = fed.start[i] + chain[i]
        parent[first : first + len(draft)] = np.where(draft.parents < 0, -1, first + draft.parents)
    line = np.full(len(row), -1, np.int64)
    line[members] = np.arange(len(members))
    place = np.flatnonzero(line[fed.row] >= 0)
    owner = fed.row[place]
    before = rows.cached[row]
    seen = before[owner] + np.minimum(fed.offset[place] + 1, chain[owner])
    return NarrowLayout(
        table=rows.slots[row[members], : seen.max()],
        row=line[owner],
        seen=seen,
        parent=parent,
        slot=slots,
        is_node=is_node,
        place=place,
    )


def _bucket(
    rows: Rows,
    row: IndexArray,
    chain: IndexArray,
    width: IndexArray,
    drafts: Sequence[Draft | None],
    fed: Ragged,
    members: IndexArray,
) -> BucketLayout:
    cached, num_queries = rows.cached[row[members]], width[members]
    seen = cached + num_queries
    key, query = np.arange(seen.max()), np.arange(num_queries.max())
    valid = query < num_queries[:, None]
    # Causal within the chain; a padding query sees what the row's last real one sees.
    mask = key <= (cached[:, None] + np.minimum(query, num_queries[:, None] - 1))[:, :, None]
    for b, member in enumerate(members):
        draft = drafts[member]
        if draft is not None and len(draft):
            root = int(cached[b] + chain[member])
            nodes = slice(int(chain[member]), int(width[member]))
            mask[b, nodes, root:] = False
            mask[b, nodes, root : root + len(draft)] = ancestors(draft.parents)
    return BucketLayout(
        kv_slots=np.where(key < seen[:, None], rows.slots[row[members], : len(key)], 0),
        mask=mask,
        queries=fed.start[members][:, None] + np.where(valid, query, 0),
        valid=valid,
    )
