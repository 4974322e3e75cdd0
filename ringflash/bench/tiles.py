"""How evenly a layout shares causal work out, in tiles and in pairs: counted, not timed."""

from __future__ import annotations

from typing import Any

from ringflash.attention import LAYOUTS, Causal, Tokens
from ringflash.attention.kernels.chunked import queries_a_tile
from ringflash.attention.work import TileCounts, tile_counts
from ringflash.bench.ours import counted

LENGTH = 16384
BLOCK_K = 128


def by_layout(devices: int, group: int) -> list[dict[str, Any]]:
    """One device, then each layout over `devices` of them."""
    found = [summary("one device", [counts(counted(LENGTH), counted(LENGTH), group)])]
    for name, layout in LAYOUTS.items():
        order = layout(LENGTH, devices)
        at = Tokens(*(x[:, order] for x in counted(LENGTH)[:2]))
        shard = LENGTH // devices
        ours = [
            counts(Tokens(*(x[:, n * shard : (n + 1) * shard] for x in at[:2])), at, group)
            for n in range(devices)
        ]
        found.append(summary(name, ours))
    return found


def counts(q_at: Tokens, k_at: Tokens, group: int) -> TileCounts:
    """The tiles of one shard's queries against all keys, of the size that `chunked` takes there."""
    block_q = queries_a_tile(q_at.positions_BT.shape[1], group)
    return tile_counts(Causal(), q_at, k_at, block_q, BLOCK_K)


def summary(layout: str, shards: list[TileCounts]) -> dict[str, Any]:
    """Of all shards; `area` is the pairs in the tiles visited. The busiest is by tiles visited."""
    visited, needed = (sum(getattr(s, name) for s in shards) for name in ("visited", "needed"))
    area = LENGTH * LENGTH * visited / sum(s.total for s in shards)
    return {
        "layout": layout,
        "visited": visited,
        "needed": needed,
        "visited_to_needed": visited / needed,
        "area_to_pairs": area / sum(s.pairs for s in shards),
        "busiest_to_mean": max(s.visited for s in shards) * len(shards) / visited,
    }
