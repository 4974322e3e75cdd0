"""The forward kernel: what a turn of its pipeline does. `forward_call.py` runs it.

A unit is block_q queries of one head against block_k keys. While the matrix units add V P of one unit to its
sum (`gather`) and make the scores of the next but one (`score`), the vector units turn the scores of the one
between into weights (`soften`).

Scores are [keys, queries]: maxima and sums run down the registers, statistics are rows, and the product with
V streams its rows of width, which fills a 256 x 256 array at width 128. Scores are in base 2
(`tile.query_factor`). FlashAttention-2 (arXiv:2307.08691, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ringflash.attention.kernel import FLOOR
from ringflash.attention.kernels.mosaic.agenda import unpacked
from ringflash.attention.kernels.mosaic.pipeline import F32, SLOTS, chunks, columns, dot
from ringflash.attention.tile import LOG2E, hidden, in_base_2, seen

Array = jax.Array


class Refs(NamedTuple):
    """What a step holds: its block of queries (heads x tiles), and scratch."""

    q: Any  # [heads, tiles, block_q, H]
    rows: Any  # [tiles, 3, block_q] int32: lo, hi, segment
    out: Any  # [heads, V, tiles * block_q] fp32
    lse: Any  # [heads, 1, tiles * block_q] fp32
    k: Any  # [SLOTS, block_k, H]
    v: Any  # [SLOTS, V, block_k]
    marks: Any  # [SLOTS, 2, block_k] int32: position and segment
    s: Any  # [block_k, block_q] fp32
    p: Any  # [block_k, block_q] in V's dtype
    top: Any  # [heads, tiles, 1, block_q] fp32: the running maximum
    total: Any  # [heads, tiles, 8, block_q] fp32: eight partial sums of the weights
    peak: Any  # [8, block_q] fp32: partial maxima of `s`
    shrink: Any  # [1, block_q] fp32: what the sum of the unit in `p` shrinks by


class Unit(NamedTuple):
    """A unit on its way."""

    at: Array  # its place in the agenda
    word: Array  # what the agenda says there
    head: Array
    fetched: Array  # tiles of keys up to its own

    @property
    def tile(self) -> Array:
        """Of queries."""
        return unpacked(self.word).resident

    @property
    def place(self) -> tuple[Array, Array]:
        """Where its state lies."""
        return self.head, self.tile

    @property
    def slot(self) -> Array:
        """Where its keys lie."""
        return self.fetched & (SLOTS - 1)


def score(
    refs: Refs,
    unit: Unit,
    marks: list[Array],
    tests: tuple[str, ...],
    softcap: float | None,
    at: slice,
) -> None:
    """S = K Q' for some of the unit's queries, and its maxima."""
    raw = dot(refs.k[unit.slot], refs.q[(*unit.place, at)], 1, 1)
    visible = None
    if tests:
        lo, hi, segment = (refs.rows[unit.tile, n : n + 1, at] for n in range(3))
        visible = seen(tests, lo, hi, marks[0], lambda: marks[1] == segment)
    s = hidden(in_base_2(raw, softcap), visible)
    refs.s[:, at] = s
    refs.peak[:, at] = s.reshape(-1, 8, s.shape[1]).max(0)


def soften(refs: Refs, unit: Unit, top: Array, shrink: Array, at: slice) -> None:
    """P = 2^(S - maximum), and its sums."""
    p = jnp.exp2(refs.s[:, at] - top[:, at])
    refs.p[:, at] = p.astype(refs.p.dtype)
    total = refs.total[(*unit.place, slice(None), at)] * shrink[:, at]
    refs.total[(*unit.place, slice(None), at)] = total + p.reshape(-1, 8, p.shape[1]).sum(0)


def gather(refs: Refs, unit: Unit, shrink: Array, at: slice) -> None:
    """out <- shrink out + V P."""
    more = dot(refs.v[unit.slot], refs.p[:, at], 1, 0)
    place = unit.head, slice(None), across(refs, unit.tile, at)
    refs.out[place] = refs.out[place] * shrink[:, at] + more


def across(refs: Refs, tile: Any, at: slice) -> Any:
    """Where queries of a tile lie in `out` and `lse`."""
    block_q = refs.s.shape[1]
    return pl.ds(pl.multiple_of(tile * block_q, block_q) + at.start, at.stop - at.start)


def turn(
    refs: Refs,
    old: Unit | None,
    now: Unit | None,
    new: Unit | None,
    tests: tuple[str, ...],
    softcap: float | None,
    chunk: int,
) -> None:
    """One turn of the pipeline: `gather` the old unit, `soften` the present one, `score` the new one."""
    block_q = refs.s.shape[1]
    gathered = refs.shrink[...]
    if now is not None:
        before = refs.top[now.place]
        top = jnp.maximum(before, refs.peak[...].max(0, keepdims=True))
        shrink = jnp.exp2(before - top)
        refs.top[now.place] = top
        refs.shrink[...] = shrink
    marks = columns(refs.marks[new.slot], 2) if new is not None else []
    for at in chunks(block_q, chunk):
        if old is not None:
            gather(refs, old, gathered, at)
        if now is not None:
            soften(refs, now, top, shrink, at)
        if new is not None:
            score(refs, new, marks, tests, softcap, at)


def each_place(refs: Refs, do: Callable[[Any, int, Any], None]) -> None:
    """do(head, tile, its queries in `out`) for all that the step holds."""
    heads, tiles, _, block_q = refs.top.shape

    def of_head(head: Array) -> None:
        for tile in range(tiles):
            do(head, tile, slice(tile * block_q, (tile + 1) * block_q))

    pl.loop(0, heads)(of_head)


def begin(refs: Refs, carried: tuple[Any, ...]) -> None:
    """The state at the start: empty, or what was carried in."""
    _, _, rows, block_q = refs.total.shape
    first = lax.broadcasted_iota(jnp.int32, (rows, block_q), 0) == 0

    def empty(head: Any, tile: int, at: Any) -> None:
        refs.out[head, :, at] = jnp.zeros((refs.out.shape[1], block_q), F32)
        refs.top[head, tile] = jnp.full((1, block_q), FLOOR, F32)
        refs.total[head, tile] = jnp.zeros((rows, block_q), F32)

    def go_on(head: Any, tile: int, at: Any) -> None:
        out, lse = (ref[head, :, at] for ref in carried)
        some = lse > FLOOR / 2
        refs.out[head, :, at] = out
        refs.top[head, tile] = jnp.where(some, lse * LOG2E, FLOOR)
        refs.total[head, tile] = jnp.where(first & some, 1.0, 0.0)

    each_place(refs, go_on if carried else empty)


def finish(refs: Refs) -> None:
    """out and lse; an empty row has out 0 and lse FLOOR."""

    def one(head: Any, tile: int, at: Any) -> None:
        total = refs.total[head, tile].sum(0, keepdims=True)
        some = total > 0
        share = jnp.where(some, 1.0 / jnp.where(some, total, 1.0), 0.0)
        refs.out[head, :, at] = refs.out[head, :, at] * share
        lse = (refs.top[head, tile] + jnp.log2(jnp.where(some, total, 1.0))) / LOG2E
        refs.lse[head, :, at] = jnp.where(some, lse, FLOOR)

    each_place(refs, one)
