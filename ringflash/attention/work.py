"""How much work a mask leaves: tiles that a kernel visits, tiles it needs, and the pairs that count.

Numpy on the host, from the same `Mask.relation` and `Mask.visible` that kernels ask. Tiles are counted a
row of them at a time, and only those neither EMPTY nor FULL are opened: no [T, S] array is made.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from ringflash.attention.mask import EMPTY, FULL, PADDING, PARTIAL, Mask, Span, Tokens
from ringflash.attention.spec import Spec


class TileCounts(NamedTuple):
    """Of all batch rows together. `pairs` are the visible (query, key) pairs of one head."""

    total: int  # tiles there are
    visited: int  # tiles that are not EMPTY by `relation`: those a kernel computes
    needed: int  # tiles that hold a visible pair
    pairs: int


def tile_counts(mask: Mask, q_at: Tokens, k_at: Tokens, block_q: int, block_k: int) -> TileCounts:
    """Count the tiles of block_q x block_k; lengths need not divide them.

    q_at, k_at: numpy arrays [B, T] and [B, S], in the order in which the rows lie on the device.
    """
    spec = Spec(mask)
    counts = TileCounts(0, 0, 0, 0)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for row in range(q_at.positions_BT.shape[0]):
            q_blocks, k_blocks = blocks(q_at, row, block_q), blocks(k_at, row, block_k)
            spans = [span(x) for x in k_blocks]
            k_span = Span(*(np.array(field) for field in zip(*spans, strict=True)))
            for q_block in q_blocks:
                line = tile_line(spec, q_block, k_blocks, k_span)
                counts = TileCounts(*(a + b for a, b in zip(counts, line, strict=True)))
    return counts


def tile_line(spec: Spec, q_block: Tokens, k_blocks: list[Tokens], k_span: Span) -> TileCounts:
    """The tiles of one block of queries."""
    relation = np.asarray(spec.relation(span(q_block), k_span))
    pairs = []
    for n in np.flatnonzero(relation > EMPTY):
        k_block = k_blocks[n]
        if relation[n] == PARTIAL:
            pairs.append(int(np.asarray(spec.visible(q_block, k_block)).sum()))
        else:
            assert relation[n] == FULL, relation[n]
            pairs.append(q_block.positions_BT.size * k_block.positions_BT.size)
    return TileCounts(len(relation), len(pairs), sum(p > 0 for p in pairs), sum(pairs))


def blocks(at: Tokens, row: int, block: int) -> list[Tokens]:
    """The tokens of one batch row in runs of `block`, the last perhaps shorter."""
    fields = [np.asarray(x)[row] for x in at[:2]]
    starts = range(0, len(fields[0]), block)
    return [Tokens(*(x[start : start + block] for x in fields)) for start in starts]


def span(at: Tokens) -> Span:
    """As `mask.spans`, of one run of tokens, in numpy."""
    real = at.segment_ids_BT > PADDING
    largest = np.iinfo(np.int32).max
    positions = at.positions_BT[real] if real.any() else None
    least, most = (largest, -largest) if positions is None else (positions.min(), positions.max())
    segments = at.segment_ids_BT.min(), at.segment_ids_BT.max()
    return Span(*map(np.int32, (least, most, *segments)))
