"""How much work a mask leaves to each device of a ring, hop by hop: tiles, counted by `Mask.relation`.

A row of tiles at a time against all keys: memory grows with the length, never with its square.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import jax
import numpy as np

from ringflash.attention import LAYOUTS, Causal, Full, Mask, Segments, Window
from ringflash.attention.kernels.mosaic.tiles import even
from ringflash.attention.mask import EMPTY, FULL, Span

TILE = 1024
RUNS = 8  # as `ring` describes a shard when it looks for hops that no pair needs


@dataclass(frozen=True)
class Load:
    """tiles: FULL and PARTIAL, [2, shards of queries, shards of keys], in units of 1024 x 1024 scores."""

    tiles: np.ndarray
    executed: int  # tiles of `block` x `block` that are not EMPTY by `relation`
    block: int

    @property
    def busiest(self) -> float:
        """Tiles of the busiest shard over those of the mean."""
        each = self.tiles.sum((0, 2))
        return float(each.max() / each.mean())

    def folded(self, inner: int) -> Load:
        """With `inner` neighbours as one shard, as Ulysses between them makes it."""
        rows = self.tiles.shape[1] // inner
        whole = self.tiles.reshape(2, rows, inner, rows, inner).sum((2, 4))
        return Load(whole, self.executed, self.block)

    def hops(
        self,
        cycles: tuple[float, float],
        *,
        both_ways: bool,
        reach: tuple[int, int] | None = None,
    ) -> np.ndarray:
        """Cycles of one head, [hops, shards]: of each device with the keys that are there at each hop.

        both_ways: half of the keys comes up the ring and half comes down.  reach: all come up, and then down,
        only so far.
        """
        cost = np.tensordot(np.array(cycles), self.tiles, 1)
        shards = len(cost)
        rank = np.arange(shards)
        up = np.stack([cost[rank, (rank - hop) % shards] for hop in range(shards)])
        down = np.stack([cost[rank, (rank + hop) % shards] for hop in range(shards)])
        if reach is not None:
            return up[[0, *range(1, reach[0] + 1), *range(shards - reach[1], shards)]]
        return (up + down) / 2 if both_ways else up


def mask_of(text: str) -> Mask:
    """causal, full, packed (causal within documents), or window:4096, causal too. Raises ValueError."""
    name, colon, width = text.partition(":")
    plain = {"causal": Causal(), "packed": Causal() & Segments(), "full": Full()}
    if name in plain and not colon:
        return plain[name]
    if name == "window" and width.isascii() and width.isdecimal() and int(width) > 0:
        return Causal() & Window(int(width))
    raise ValueError(f"wanted causal, packed, full or window:TOKENS, found {text!r}")


def load(mask: Mask, layout: str, seq_len: int, shards: int) -> Load:
    """Of one batch row of whole documents. Raises ValueError where the layout cannot cut the length."""
    order = LAYOUTS[layout](seq_len, shards)
    length = seq_len // shards
    block = even(length, TILE)
    spans = cut(order.reshape(shards, length), block)
    tiles = np.zeros((2, shards, shards))
    executed = 0
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for shard in range(shards):
            found = relations(mask, picked(spans, shard), spans)
            executed += int((found > EMPTY).sum())
            full = (found == FULL).sum((0, 2))
            tiles[:, shard] = full, (found > EMPTY).sum((0, 2)) - full
    return Load(tiles * (block / TILE) ** 2, executed, block)


def cut(positions: np.ndarray, block: int) -> Span:
    """The spans of [shards, length] positions in runs of `block`, the last perhaps shorter."""
    starts = np.arange(0, positions.shape[1], block)
    least = np.minimum.reduceat(positions, starts, axis=1).astype(np.int32)
    most = np.maximum.reduceat(positions, starts, axis=1).astype(np.int32)
    return Span(least, most, np.zeros_like(least), np.zeros_like(least))


def picked(spans: Span, shard: int) -> Span:
    """Those of one shard."""
    return Span(*(x[shard] for x in spans))


def relations(mask: Mask, q: Span, k: Span) -> np.ndarray:
    """[tiles of q, shards, tiles of k]."""
    rows = Span(*(x[:, None, None] for x in q))
    return np.asarray(mask.relation(rows, Span(*(x[None] for x in k))))


def reach(mask: Mask, layout: str, seq_len: int, shards: int) -> tuple[int, int]:
    """How many hops up and down some query needs, each pair going the shorter way: as `ring` finds it."""
    length = seq_len // shards
    order = LAYOUTS[layout](seq_len, shards).reshape(shards, length)
    spans = cut(order, length // RUNS if length % RUNS == 0 else length)
    up = down = 0
    for shard in range(shards):
        meets = (relations(mask, picked(spans, shard), spans) > EMPTY).any((0, 2))
        away = (shard - np.flatnonzero(meets)) % shards
        up = max([up, *away[2 * away <= shards].tolist()])
        down = max([down, *(shards - away[2 * away > shards]).tolist()])
    return up, down


def least_tiles(mask: Mask, seq_len: int, block: int) -> int:
    """How many tiles hold a visible pair where the tokens lie in their order: no layout needs fewer.

    Exact for the masks of `mask_of`: where spans of consecutive positions are not EMPTY, a pair is seen.
    """
    spans = cut(np.arange(seq_len).reshape(1, -1), block)
    rows = (picked(Span(*(x[:, n : n + 1] for x in spans)), 0) for n in range(spans[0].shape[1]))
    return reduce(lambda total, q: total + int((relations(mask, q, spans) > EMPTY).sum()), rows, 0)
