"""Lay rows out for one forward pass: which tokens are fed, where they stand, what they may see.

A row feeds its uncached tokens as a chain and hangs its draft below the last of them, the root. Prefill,
plain decoding and tree verification are the same thing with other counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rhymerl.compiled import compiled
from rhymerl.drafts import DraftBatch
from rhymerl.engine.paged_attention import CHAIN, ROOT, PagedLayout, suits_paging
from rhymerl.engine.rows import Rows
from rhymerl.engine.tiles import TileLayout, tile
from rhymerl.replayed import RouteArray
from rhymerl.types import BoolArray, IndexArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """Rows of like width: what attention gathers. B rows, Q queries, S keys."""

    kv_slots: IndexArray  # [B, S]
    mask: BoolArray  # [B, Q, S]
    queries: IndexArray  # [B * Q] indices into the packed pass
    real: IndexArray  # [T] which of the queries are no padding
    tokens: IndexArray  # [T] their indices into the packed pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLayout:
    """One packed pass over N tokens of the feeding rows `row` [F]; E rows emit, K = draft nodes, M = E + K."""

    row: IndexArray  # [F]
    source: IndexArray  # [F] whose state each goes on from: its own, that of its prefix, or NOBODY's
    chain: IndexArray  # [F] committed tokens fed
    width: IndexArray  # [F] and nodes
    emits: IndexArray  # [E] which of the F rows end in a root
    emitting: IndexArray  # [E] these rows
    drafts: DraftBatch  # of the emitting rows, R = E
    token_ids: IndexArray  # [N]
    positions: IndexArray  # [N]
    slots: IndexArray  # [N] where keys and values go
    node_index: IndexArray  # [K] of each node in the packed pass
    node_depth: IndexArray  # [K] from 1
    logit_indices: IndexArray  # [M] tokens whose logits are needed: every root, then its draft nodes
    logit_start: IndexArray  # [E] where each emitting row's logits begin
    logit_row: IndexArray  # [M] which of the E
    logit_level: IndexArray  # [M] 0 = root, else the node's depth
    num_seen: int  # keys that roots and nodes attend to, summed; of their trees each node counts its root's
    buckets: list[BucketLayout]
    paged: PagedLayout | None  # tokens that the compiled attention takes
    tiles: TileLayout | None  # all tokens, for the attention of a GPU: there are no buckets then

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decoding(self) -> bool:
        """Return whether every row feeds one token and its draft: no prompt is being computed."""
        return bool((self.chain == 1).all())

    def known_routes(self, rows: Rows) -> RouteArray | None:
        """Return the routes that tokens of the pass are to take, [N, layers, k]; None where routers choose all."""
        if not (rows.routes and rows.brought):
            return None
        found: RouteArray | None = None
        first = np.cumsum(self.width) - self.width
        for f, row in enumerate(self.row.tolist()):
            cached = rows.cached[row]
            part = rows.brought.get(row, ())[cached : cached + self.chain[f]]
            if len(part):
                found = rows.routes.blank(self.num_tokens) if found is None else found
                found[first[f] : first[f] + len(part)] = part
        return found


def lay_out_pass(
    rows: Rows,
    row: IndexArray,
    chain: IndexArray,
    emits: IndexArray,
    drafts: DraftBatch,
    *,
    compiled: bool = False,
    tile_tokens: Callable[[int], int] | None = None,
) -> PassLayout:
    """Take slots for all fed tokens and describe the pass. The caller has checked that there are enough slots.

    `drafts` hang below the roots of the rows `emits`. Prefix rows come before the rows that read them. With `compiled`,
    rows of few queries are laid out for engine/paged_attention.py, and only the others go into buckets. With
    `tile_tokens`, which returns the tokens of a tile for the widest row of a pass, all are laid out for
    engine/triton_attention.py.
    """
    width = chain.copy()
    width[emits] += drafts.counts
    num_keys = rows.cached[row] + width
    paged = suits_paging(width, num_keys) if compiled else np.zeros(len(row), np.bool_)
    slots = rows.pool.take(int(width.sum()))
    num_nodes = len(drafts.parents)
    of_each = (5, len(slots)), (2, num_nodes), (3, len(emits) + num_nodes), (2, len(emits)), (1, len(row))
    packed = _Packed(*(line for shape in of_each for line in np.empty(shape, np.int64)))
    num_seen = _fill(
        _RowTables(rows.tokens, rows.slots, rows.cached, rows.shared, rows.prefix_row),
        *(row, chain, emits, paged, slots),
        *(drafts.token_ids, drafts.parents, drafts.starts),
        packed,
    )
    tiles = None
    if tile_tokens is not None:
        tiles = tile(rows, row, chain, width, emits, drafts, most=tile_tokens(int(width.max(initial=1))))
    num_paged = int(np.count_nonzero(paged))
    buckets = tiles is None and num_paged < len(row)
    return PassLayout(
        row=row,
        source=packed.source,
        chain=chain,
        width=width,
        emits=emits,
        emitting=packed.emitting,
        drafts=drafts,
        token_ids=packed.token_ids,
        positions=packed.positions,
        slots=slots,
        node_index=packed.node_index,
        node_depth=packed.node_depth,
        logit_indices=packed.logit_indices,
        logit_start=packed.logit_start,
        logit_row=packed.logit_row,
        logit_level=packed.logit_level,
        num_seen=num_seen,
        buckets=_buckets(rows, row, chain, width, emits, drafts, ~paged) if buckets else [],
        paged=_paged(rows, slots, packed) if num_paged else None,
        tiles=tiles,
    )


def _paged(rows: Rows, slots: IndexArray, packed: _Packed) -> PagedLayout:
    return PagedLayout(table=rows.slots, row=packed.reader, seen=packed.seen, parent=packed.parent, slot=slots)


class _RowTables(NamedTuple):
    """What `Rows` has of all rows."""

    tokens: IntArray
    slots: IndexArray
    cached: IndexArray
    shared: IndexArray
    prefix_row: IndexArray


class _Packed(NamedTuple):
    """What stands in `PassLayout`, and of each token what `PagedLayout` calls row, seen and parent."""

    token_ids: IndexArray
    positions: IndexArray
    reader: IndexArray
    seen: IndexArray
    parent: IndexArray
    node_index: IndexArray
    node_depth: IndexArray
    logit_indices: IndexArray
    logit_row: IndexArray
    logit_level: IndexArray
    emitting: IndexArray
    logit_start: IndexArray
    source: IndexArray


@compiled
def _fill(
    rows: _RowTables,
    row: IndexArray,
    chain: IndexArray,
    emits: IndexArray,
    paged: BoolArray,
    slots: IndexArray,
    node_tokens: IntArray,
    node_parents: IntArray,
    node_starts: IndexArray,
    packed: _Packed,
) -> int:
    """Write what stands in `PassLayout` and `PagedLayout` about each token, node and logit; rows learn their new slots.

    Returns `num_seen`.
    """
    n, m, e, num_seen = 0, 0, 0, 0
    for f in range(len(row)):
        r = row[f]
        base = rows.cached[r]
        packed.source[f] = rows.prefix_row[r] if base == rows.shared[r] else r
        if rows.prefix_row[r] >= 0 and base == rows.shared[r]:  # it has just entered
            for j in range(base):
                rows.slots[r, j] = rows.slots[rows.prefix_row[r], j]
        first = n
        for j in range(base, base + chain[f]):
            rows.slots[r, j] = slots[n]
            packed.token_ids[n], packed.positions[n], packed.seen[n] = rows.tokens[r, j], j, j + 1
            n += 1
        if e < len(emits) and emits[e] == f:
            packed.emitting[e], packed.logit_start[e] = r, m
            packed.logit_indices[m], packed.logit_row[m], packed.logit_level[m] = n - 1, e, 0
            m += 1
            root, tree = base + chain[f], n
            num_seen += root * (1 + node_starts[e + 1] - node_starts[e])
            for k in range(node_starts[e], node_starts[e + 1]):
                above = node_parents[k]
                depth = 1 if above < 0 else packed.node_depth[node_starts[e] + above] + 1
                rows.slots[r, root + n - tree] = slots[n]
                packed.token_ids[n], packed.positions[n], packed.seen[n] = node_tokens[k], root - 1 + depth, root
                packed.parent[n] = ROOT if above < 0 else tree + above
                packed.node_index[k], packed.node_depth[k] = n, depth
                packed.logit_indices[m], packed.logit_row[m], packed.logit_level[m] = n, e, depth
                n, m = n + 1, m + 1
            e += 1
        for each in range(first, first + chain[f]):
            packed.parent[each] = CHAIN
        for each in range(first, n):
            packed.reader[each] = r if paged[f] else -1
    return num_seen


def _buckets(
    rows: Rows,
    row: IndexArray,
    chain: IndexArray,
    width: IndexArray,
    emits: IndexArray,
    drafts: DraftBatch,
    wide: BoolArray,
) -> list[BucketLayout]:
    """Rows whose widths share a power of two go together, so padding at most doubles a row."""
    members = np.flatnonzero(wide)
    size_class = np.ceil(np.log2(width[members]))
    emitter = np.full(len(row), -1, np.int64)
    emitter[emits] = np.arange(len(emits))
    start, buckets = np.cumsum(width) - width, []
    for each in sorted(set(size_class.tolist())):
        of_class = members[size_class == each]
        line, fed = row[of_class], width[of_class]
        shape = (len(of_class), int(fed.max()), int((rows.cached[line] + fed).max()))
        kv_slots, mask = np.zeros((shape[0], shape[2]), np.int64), np.zeros(shape, np.bool_)
        queries, valid = np.empty(shape[:2], np.int64), np.empty(shape[:2], np.bool_)
        _fill_bucket(
            *(rows.slots, rows.cached),
            *(line, fed, chain[of_class], start[of_class], emitter[of_class]),
            *(drafts.parents, drafts.starts),
            *(kv_slots, mask, queries, valid),
        )
        real = np.flatnonzero(valid)
        tokens = queries.ravel()[real]
        buckets.append(BucketLayout(kv_slots=kv_slots, mask=mask, queries=queries.ravel(), real=real, tokens=tokens))
    return buckets


@compiled
def _fill_bucket(
    row_slots: IndexArray,
    cached: IndexArray,
    row: IndexArray,
    width: IndexArray,
    chain: IndexArray,
    start: IndexArray,
    emitter: IndexArray,
    node_parents: IntArray,
    node_starts: IndexArray,
    kv_slots: IndexArray,
    mask: BoolArray,
    queries: IndexArray,
    valid: BoolArray,
) -> None:
    """Write the `BucketLayout` of B rows and which queries are real; `kv_slots` and `mask` come as zeros.

    A row feeds `chain` tokens and its draft, if it is an emitting one (`emitter` >= 0), `width` in all.
    """
    for b in range(len(row)):
        root = cached[row[b]] + chain[b]
        for key in range(cached[row[b]] + width[b]):
            kv_slots[b, key] = row_slots[row[b], key]
        for query in range(mask.shape[1]):
            real = min(query, width[b] - 1)  # a padding query sees what the row's last real one sees
            valid[b, query], queries[b, query] = query < width[b], start[b] + (query if query < width[b] else 0)
            mask[b, query, : min(cached[row[b]] + real + 1, root)] = True
            node = real - chain[b]
            while node >= 0:  # a node sees itself and its ancestors
                mask[b, query, root + node] = True
                node = node_parents[node_starts[emitter[b]] + node]
