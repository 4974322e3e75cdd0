"""How evenly a layout shares causal work out, in tiles and in pairs: counted, not timed."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringflash.attention import LAYOUTS, ROW_LAYOUTS, Causal, Segments, Tokens, order_rows
from ringflash.attention.kernels.chunked import BLOCK_K, queries_a_tile
from ringflash.attention.work import TileCounts, tile_counts

LENGTH = 16384
PACKED = (6000, 300, 4500, 1200, 84, 2500, 1800)  # documents of one row; they make up LENGTH


def by_layout(devices: int) -> list[dict[str, Any]]:
    """A row of one document and a row of several, on one device and in each layout over `devices`."""
    found = []
    for documents in ((LENGTH,), PACKED):
        row = packed(documents)
        found.append(summary("one device", documents, [counts(row, row)]))
        for layout in [*LAYOUTS, *ROW_LAYOUTS]:
            positions_BT, segment_ids_BT = map(np.asarray, row[:2])
            order_BT = order_rows(layout, positions_BT, segment_ids_BT, devices)
            at = [np.take_along_axis(x, order_BT, axis=1) for x in (positions_BT, segment_ids_BT)]
            shards = zip(*(np.split(x, devices, axis=1) for x in at), strict=True)
            ours = [counts(Tokens(*shard), Tokens(*at)) for shard in shards]
            found.append(summary(layout, documents, ours))
    return found


def packed(documents: tuple[int, ...]) -> Tokens:
    """One row of documents of these lengths."""
    positions = np.concatenate([np.arange(length) for length in documents])
    segments = np.repeat(np.arange(len(documents)), documents)
    return Tokens(positions[None].astype(np.int32), segments[None].astype(np.int32))


def counts(q_at: Tokens, k_at: Tokens) -> TileCounts:
    """The tiles of one shard's queries against all keys, of the size that `chunked` takes there."""
    block_q = queries_a_tile(q_at.positions_BT.shape[1])
    return tile_counts(Causal() & Segments(), q_at, k_at, block_q, BLOCK_K)


def summary(layout: str, documents: tuple[int, ...], shards: list[TileCounts]) -> dict[str, Any]:
    """Of all shards; `area` is the pairs in the tiles visited. The busiest is by tiles needed."""
    visited, needed = (sum(getattr(s, name) for s in shards) for name in ("visited", "needed"))
    area = LENGTH * LENGTH * visited / sum(s.total for s in shards)
    pairs = [s.pairs for s in shards]
    return {
        "documents": len(documents),
        "layout": layout,
        "visited": visited,
        "needed": needed,
        "visited_to_needed": visited / needed,
        "area_to_pairs": area / sum(pairs),
        "busiest_to_mean": max(s.needed for s in shards) * len(shards) / needed,
        "busiest_to_mean_pairs": max(pairs) * len(shards) / sum(pairs),
    }
