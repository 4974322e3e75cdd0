"""Layouts: the order of a row's tokens over the shards of the ring, as a permutation.

`order(length, shards)` gives order_T with slot t holding token order_T[t]; shard r holds the slots
[r * length / shards, (r + 1) * length / shards). The pipeline applies it once, to every array alike.
A row layout also looks at the documents in the row, and gives each row an order of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

Layout = Callable[[int, int], np.ndarray]
RowLayout = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


def contiguous(length: int, shards: int) -> np.ndarray:
    """Shard r holds the r-th run. Causal work is unbalanced: the last shard has all of it."""
    divide("contiguous", length, shards, 1)
    return np.arange(length)


def zigzag(length: int, shards: int) -> np.ndarray:
    """Shard r holds runs r and 2 * shards - 1 - r of 2 * shards: causal work is equal on all shards."""
    divide("zigzag", length, shards, 2)
    runs = np.arange(length).reshape(2 * shards, -1)
    first = np.arange(shards)
    return runs[np.stack([first, 2 * shards - 1 - first], axis=1)].reshape(-1)


def striped(length: int, shards: int) -> np.ndarray:
    """Shard r holds tokens r, r + shards, r + 2 * shards, ... (arXiv:2311.09431)."""
    divide("striped", length, shards, 1)
    return np.arange(length).reshape(-1, shards).T.reshape(-1)


def balanced(positions_T: np.ndarray, segment_ids_T: np.ndarray, shards: int) -> np.ndarray:
    """For packed documents: equal causal work on all shards, whatever the documents' lengths.

    The row is cut in up to 16 blocks a shard, of a tile's 256 tokens where it is long enough. A block
    costs the blocks of keys that its queries see. The dearest goes first, always to the shard with the
    least work that has room (longest processing time first, Graham 1969), and blocks keep their order
    within a shard.
    """
    length = len(positions_T)
    divide("balanced", length, shards, 1)
    most = max(4, length // shards // 256)
    room = next(n for n in (16, 8, 4, 2, 1) if n <= most and length % (n * shards) == 0)
    blocks = np.arange(length).reshape(room * shards, -1)
    costs = [blocks_seen(positions_T, segment_ids_T, block) for block in blocks]
    held: list[list[int]] = [[] for _ in range(shards)]
    least = [(0, shard) for shard in range(shards)]
    for block in sorted(range(len(blocks)), key=lambda n: -costs[n]):
        work, shard = heapq.heappop(least)
        held[shard].append(block)
        if len(held[shard]) < room:
            heapq.heappush(least, (work + costs[block], shard))
    return np.concatenate([blocks[sorted(shard)].reshape(-1) for shard in held])


def blocks_seen(positions_T: np.ndarray, segment_ids_T: np.ndarray, block: np.ndarray) -> int:
    """Blocks of keys that the queries of `block` see: from where its first document begins to itself."""
    real = block[segment_ids_T[block] >= 0]
    if not len(real):
        return 0
    begin = int(real[0] - positions_T[real[0]])
    return int(block[0]) // len(block) - begin // len(block) + 1


def divide(name: str, length: int, shards: int, runs: int) -> None:
    """Raise ValueError unless `length` divides into `runs` runs for each shard."""
    if length < 1 or shards < 1 or length % (runs * shards):
        unit = runs * shards
        raise ValueError(f"{name} over {shards} shards needs a multiple of {unit}, found {length}")


def inverse(order_T: np.ndarray) -> np.ndarray:
    """The permutation that puts slots back: x[order][inverse(order)] == x."""
    return np.argsort(order_T)
