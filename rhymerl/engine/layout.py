"""From rows to one forward pass: which tokens are fed, where they stand, what they may see.

A row feeds its uncached tokens as a chain and hangs its draft below the last of them, the root. Prefill,
plain decoding and tree verification are the same thing with other counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.engine.narrow import NarrowLayout, is_narrow
from rhymerl.engine.ragged import IndexArray, Ragged, ragged
from rhymerl.engine.rows import Rows
from rhymerl.engine.tree import depths, show_ancestors
from rhymerl.types import DraftBatch

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
    """One packed pass over N tokens of the rows `row` [F], the feeding ones; E of them emit, K = draft nodes, M = E + K."""

    row: IndexArray  # [F]
    chain: IndexArray  # [F] committed tokens fed
    drafts: DraftBatch  # of the emitting rows, R = E
    fed: Ragged  # chain + draft nodes of every feeding row
    token_ids: IntArray  # [N]
    positions: IndexArray  # [N]
    slots: IndexArray  # [N] where keys and values go
    node_place: IndexArray  # [K] of each node in the packed pass
    node_depth: IndexArray  # [K] from 1
    emits: IndexArray  # [E] which of the F rows end in a root
    logit_places: IndexArray  # [M] tokens whose logits are needed: every root, then its draft nodes
    logit_start: IndexArray  # [E] where each emitting row's logits begin
    logit_row: IndexArray  # [M] which of the E
    logit_level: IndexArray  # [M] 0 = root, else the node's depth
    buckets: list[BucketLayout]
    narrow: NarrowLayout | None  # rows that the compiled attention takes

    @property
    def is_decoding(self) -> bool:
        """Whether every row feeds one token and its draft: no prompt is being computed."""
        return bool((self.chain == 1).all())


def lay_out(
    rows: Rows, row: IndexArray, chain: IndexArray, emits: IndexArray, drafts: DraftBatch, *, compiled: bool = False
) -> PassLayout:
    """Take slots for all fed tokens and describe the pass. The caller has checked that there are enough slots.

    `drafts` hang below the roots of the rows `emits`. Prefix rows come before the rows that read them. With `compiled` narrow
    rows are laid out for engine/narrow.py, and only the wide ones go into buckets.
    """
    num_nodes = np.zeros(len(row), np.int64)
    num_nodes[emits] = drafts.counts
    fed = ragged(chain + num_nodes)
    node_place = np.flatnonzero(fed.offset >= chain[fed.row])
    node_depth = depths(drafts) if len(node_place) else node_place
    place = rows.cached[row][fed.row] + fed.offset
    slots = _take_slots(rows, row, fed, place)
    token_ids = rows.tokens[row[fed.row], place]
    token_ids[node_place] = drafts.token_ids
    positions = place.copy()
    positions[node_place] = (rows.cached[row] + chain - 1)[fed.row[node_place]] + node_depth

    logits = ragged(1 + drafts.counts)
    level = np.zeros(logits.total, np.int64)
    level[logits.offset > 0] = node_depth
    width = chain + num_nodes
    narrow = is_narrow(width, rows.cached[row] + width) if compiled else np.zeros(len(row), np.bool_)
    packed = _PackedRows(row=row, chain=chain, width=width, fed=fed, drafts=drafts, node_place=node_place)
    return PassLayout(
        row=row,
        chain=chain,
        drafts=drafts,
        fed=fed,
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        node_place=node_place,
        node_depth=node_depth,
        emits=emits,
        logit_places=(fed.start + chain - 1)[emits][logits.row] + logits.offset,
        logit_start=logits.start,
        logit_row=logits.row,
        logit_level=level,
        buckets=_buckets(rows, packed, np.flatnonzero(~narrow)),
        narrow=_narrow(rows, packed, slots, np.flatnonzero(narrow)) if narrow.any() else None,
    )


def _take_slots(rows: Rows, row: IndexArray, fed: Ragged, place: IndexArray) -> IndexArray:
    """Slots for all fed tokens, [N]; rows that have just entered learn the slots of their prefix."""
    slots = rows.pool.take(fed.total)
    rows.slots[row[fed.row], place] = slots
    for each in row[rows.is_request[row] & (rows.shared[row] > 0) & (rows.cached[row] == rows.shared[row])]:
        rows.read_prefix(int(each))
    return slots


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedRows:
    """What the attention layouts of a pass are made from; fields as in PassLayout."""

    row: IndexArray
    chain: IndexArray
    width: IndexArray  # [F] chain + nodes
    fed: Ragged
    drafts: DraftBatch
    node_place: IndexArray


def _narrow(rows: Rows, packed: _PackedRows, slots: IndexArray, members: IndexArray) -> NarrowLayout:
    fed, node_place = packed.fed, packed.node_place
    first = (fed.start + packed.chain)[fed.row[node_place]]  # of the tree that each node is in
    parent = np.full(fed.total, -1, np.int64)
    parent[node_place] = np.where(packed.drafts.parents < 0, -1, first + packed.drafts.parents)
    is_node = np.zeros(fed.total, np.bool_)
    is_node[node_place] = True
    line = np.full(len(packed.row), -1, np.int64)
    line[members] = np.arange(len(members))
    place = np.flatnonzero(line[fed.row] >= 0)
    owner = fed.row[place]
    seen = rows.cached[packed.row][owner] + np.minimum(fed.offset[place] + 1, packed.chain[owner])
    return NarrowLayout(
        table=rows.slots[packed.row[members], : seen.max()],
        row=line[owner],
        seen=seen,
        parent=parent,
        slot=slots,
        is_node=is_node,
        place=place,
    )


def _buckets(rows: Rows, packed: _PackedRows, members: IndexArray) -> list[BucketLayout]:
    """Rows whose widths share a power of two go together, so padding at most doubles a row."""
    if not len(members):
        return []
    size_class = np.ceil(np.log2(packed.width[members])).astype(np.int64)
    return [_bucket(rows, packed, members[size_class == each]) for each in np.unique(size_class)]


def _bucket(rows: Rows, packed: _PackedRows, members: IndexArray) -> BucketLayout:
    row, num_queries = packed.row[members], packed.width[members]
    cached = rows.cached[row]
    seen = cached + num_queries
    key, query = np.arange(seen.max()), np.arange(num_queries.max())
    valid = query < num_queries[:, None]
    # Causal within the chain; a padding query sees what the row's last real one sees.
    mask = key <= (cached[:, None] + np.minimum(query, num_queries[:, None] - 1))[:, :, None]
    if len(packed.node_place):
        line = np.full(len(packed.row), -1, np.int64)
        line[members] = np.arange(len(members))
        owner = packed.fed.row[packed.node_place]
        root = (rows.cached[packed.row] + packed.chain)[owner]
        show_ancestors(
            mask, line[owner], packed.fed.offset[packed.node_place], root, packed.drafts.parents, packed.drafts.starts
        )
    return BucketLayout(
        kv_slots=np.where(key < seen[:, None], rows.slots[row, : len(key)], 0),
        mask=mask,
        queries=packed.fed.start[members][:, None] + np.where(valid, query, 0),
        valid=valid,
    )
