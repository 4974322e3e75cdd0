"""The backward kernel: five products a unit in one pass, in a software pipeline of three stages.

The step holds tiles of keys and their dk, dv; tiles of queries stream past with dout, lse, delta and dq, which is
read, added to and written back once a step. `expand` makes S and dP of a unit, `weigh` turns those of the unit
before into P and dS, `gather` adds the products of the one before that. See `forward.py`, which works alike.

Two layouts of a score tile, as is quicker on a generation: keys down (statistics are rows) or queries down.
FlashAttention-2 (arXiv:2307.08691, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringflash.attention.kernels.mosaic.agenda import Tests, unpacked
from ringflash.attention.kernels.mosaic.forward import (
    F32,
    SLOTS,
    by_kind,
    columns_of,
    dot,
    like,
    padded,
)
from ringflash.attention.kernels.mosaic.tiles import Tiles
from ringflash.attention.tile import hidden, in_base_2, score_gradient, seen

Array = jax.Array
LSE, DELTA, LO_ROW, HI_ROW, SEGMENT_ROW, ROWS = 0, 1, 2, 3, 4, 8  # the rows that go with queries, as int32 bits


class Refs(NamedTuple):
    """What a step holds: its block of keys, and scratch."""

    k: Any  # [held, block_k, H]
    v: Any  # [held, block_k, V]
    marks: Any  # [held, 2, block_k] int32: position and segment
    dk: Any  # [held, block_k, H] or [held, H, block_k] fp32
    dv: Any  # alike
    q: Any  # [SLOTS, block_q, H]
    dout: Any  # [SLOTS, block_q, V]
    rows: Any  # [SLOTS, ROWS, block_q] int32
    dq: Any  # [SLOTS, block_q, H] fp32
    turned_k: Any  # [held, H, block_k]
    s: Any  # a score tile, fp32: products, before cap and mask
    dp: Any  # the same
    p: Any  # a score tile in the dtype of the inputs
    ds: Any  # the same


class Unit(NamedTuple):
    """A unit on its way: head and tile of queries, tile of keys, tiles of queries fetched so far, last of its tile."""

    head: Array
    tile: Array
    held: Array
    fetched: Array
    final: Array

    @property
    def slot(self) -> Array:
        """Where its queries lie."""
        return self.fetched & (SLOTS - 1)


@dataclass(frozen=True)
class Form:
    """How a unit is computed: the layout of a score tile, and what is constant in the arithmetic.

    keys_down: tiles are [keys, queries].  turned: dk, dv are [width, keys]: products that stream the width.
    scale: of d(product) to dq.  unscale: of dk, whose q holds `query_factor`, to the true dk.
    """

    keys_down: bool
    turned: bool
    chunk: int
    scale: float
    unscale: float
    softcap: float | None

    @property
    def key_dim(self) -> int:
        """Which dim of a score tile is the keys'."""
        return 0 if self.keys_down else 1


def expand(refs: Refs, unit: Unit, form: Form, at: slice) -> None:
    """S and dP for a run of columns."""
    q, dout, k, v = refs.q, refs.dout, refs.k, refs.v
    if form.keys_down:
        refs.s[:, at] = dot(k[unit.held], q[unit.slot, at], 1, 1)
        refs.dp[:, at] = dot(v[unit.held], dout[unit.slot, at], 1, 1)
    else:
        refs.s[:, at] = dot(q[unit.slot], k[unit.held, at], 1, 1)
        refs.dp[:, at] = dot(dout[unit.slot], v[unit.held, at], 1, 1)


def lines(refs: Refs, unit: Unit, form: Form, tests: tuple[str, ...]) -> Callable[[slice], Any]:
    """For a run of columns: (lse, delta, lo, hi, segment of queries, position and segment of keys).

    Those of one side are rows [1, n], those of the other columns [n, 1].
    """
    rows, marks = refs.rows[unit.slot], refs.marks[unit.held]
    if not form.keys_down:
        turned = rows.T
        of_query = [turned[:, n : n + 1] for n in range(5)]
        return lambda at: (*of_query, *(marks[n : n + 1, at] for n in range(2)))
    turned = jnp.concatenate([marks] * 4).T if tests else None
    of_key = [None if turned is None else turned[:, n : n + 1] for n in range(2)]
    return lambda at: (*(rows[n : n + 1, at] for n in range(5)), *of_key)


def weigh(refs: Refs, line: Any, form: Form, tests: tuple[str, ...], at: slice) -> None:
    """P and dS for a run of columns."""
    lse, delta, lo, hi, segment, position, of_key = line
    raw = refs.s[:, at]
    visible = seen(tests, lo, hi, position, lambda: of_key == segment)
    score = hidden(in_base_2(raw, form.softcap), visible)
    p = jnp.exp2(score - pltpu.bitcast(lse, F32))
    ds = score_gradient(p, refs.dp[:, at], pltpu.bitcast(delta, F32), raw, form.softcap)
    refs.p[:, at] = p.astype(refs.p.dtype)
    refs.ds[:, at] = ds.astype(refs.ds.dtype)


def gather(refs: Refs, unit: Unit, form: Form) -> None:
    """dv += P dout, dk += dS q, dq += dS k."""
    q, dout, turned_k = refs.q[unit.slot], refs.dout[unit.slot], refs.turned_k[unit.held]
    p, ds, key_dim = refs.p[...], refs.ds[...], form.key_dim
    if form.turned:
        refs.dv[unit.held] += dot(dout.T, p, 1, 1 - key_dim)
        refs.dk[unit.held] += dot(q.T, ds, 1, 1 - key_dim)
    else:
        refs.dv[unit.held] += dot(p, dout, 1 - key_dim, 0)
        refs.dk[unit.held] += dot(ds, q, 1 - key_dim, 0)
    refs.dq[unit.slot] += dot(turned_k, ds, 1, key_dim).T * form.scale


def turn(
    refs: Refs,
    old: Unit | None,
    now: Unit | None,
    new: Unit | None,
    form: Form,
    tests: tuple[str, ...],
) -> None:
    """One turn of the pipeline; the tests are those of the present unit."""
    if old is not None:
        gather(refs, old, form)
    runs = columns_of(refs.s.shape[1], form.chunk)
    if now is not None:
        line = lines(refs, now, form, tests)
        for at in runs:
            weigh(refs, line(at), form, tests, at)
    if new is not None:
        for at in runs:
            expand(refs, new, form, at)


class Traffic(NamedTuple):
    """Copies of a tile of queries into a slot, and of its dq back; each starts, or waits."""

    fetch: Callable[[Array, Array, Array], None]
    arrive: Callable[[Array], None]
    put: Callable[[Array, Array, Array], None]
    gone: Callable[[Array], None]


def run(refs: Refs, agenda: Any, heads: int, traffic: Traffic, form: Form, tests: Tests) -> None:
    """All units of a step: for each head the list."""
    length = (agenda.shape[-1] - 128) // 2
    count = agenda[0, 0, 0, 2 * length]
    units = count * heads
    ends = Tests((tests.choices[0], tests.choices[-1]))  # the last turn need not be the quickest
    zero = jnp.int32(0)

    def next_unit(place: Array, head: Array, fetched: Array) -> tuple[Unit, Array]:
        """The unit at a place of the list; if it is the first of a tile, the tile is there when this returns."""
        tile, held, kind, new, final = unpacked(agenda[0, 0, 0, place])
        new &= head < heads
        slot, next_slot = (fetched + 1) & (SLOTS - 1), (fetched + 2) & (SLOTS - 1)

        @pl.when(new)
        def _() -> None:
            @pl.when(fetched == 0)
            def _() -> None:
                traffic.fetch(head, tile, slot)

            ahead = agenda[0, 0, 0, length + place]
            first, *_ = unpacked(agenda[0, 0, 0, 0])
            next_head = jnp.where(ahead < 0, head + 1, head)

            @pl.when(next_head < heads)
            def _() -> None:
                pl.when(fetched + 2 > SLOTS)(lambda: traffic.gone(next_slot))
                traffic.fetch(next_head, jnp.where(ahead < 0, first, ahead), next_slot)

            traffic.arrive(slot)

        return Unit(head, tile, held, fetched + new.astype(jnp.int32), final), kind

    def onward(place: Array, head: Array) -> tuple[Array, Array]:
        done = place == count - 1
        return jnp.where(done, 0, place + 1), jnp.where(done, head + 1, head)

    def give_back(unit: Unit) -> None:
        pl.when(unit.final)(lambda: traffic.put(unit.head, unit.tile, unit.slot))

    @pl.when(units > 0)
    def _() -> None:
        first, kind = next_unit(zero, zero, zero)
        turn(refs, None, None, first, form, ())
        place, head = onward(zero, zero)
        second, next_kind = next_unit(place, head, first.fetched)
        by_kind(ends, kind, lambda tests: turn(refs, None, first, second, form, tests))

        def body(_: Array, state: Any) -> Any:
            old, now, kind, place, head = state
            place, head = onward(place, head)
            new, next_kind = next_unit(place, head, now.fetched)
            by_kind(tests, kind, lambda tests: turn(refs, old, now, new, form, tests))
            give_back(old)
            return now, new, next_kind, place, head

        state = (first, second, next_kind, place, head)
        old, now, kind, _, _ = lax.fori_loop(2, units, body, state)

        @pl.when(units > 1)
        def _() -> None:
            by_kind(ends, kind, lambda tests: turn(refs, old, now, None, form, tests))
            give_back(old)

        last = jax.tree.map(lambda a, b: jnp.where(units > 1, a, b), now, first)
        turn(refs, last, None, None, form, ())
        give_back(last)
        for n in range(SLOTS):
            pl.when(last.fetched > n)(lambda n=n: traffic.gone((last.fetched - n) & (SLOTS - 1)))


class Inputs(NamedTuple):
    """What the kernel reads, tiled; from `tpu.py`. Tiles of queries are nq, tiles of keys nk."""

    q: Array  # [B, N, nq, block_q, H], multiplied by `tile.query_factor`
    dout: Array  # [B, N, nq, block_q, V]
    rows: Array  # [B, N, nq, ROWS, block_q] int32: bits of lse log2(e) and delta, then lo, hi, segment
    k: Array  # [B, K, nk, block_k, H]
    v: Array  # [B, K, nk, block_k, V]
    marks: Array  # [B, nk, 2, block_k] int32


def backward(
    x: Inputs,
    dq: Array,
    dk_dv: tuple[Array, Array] | None,
    *,
    lists: Array,
    tests: Tests,
    form: Form,
    held: int,
    options: dict[str, Any],
) -> tuple[Array, Array, Array]:
    """dq [B, N, nq, block_q, H], and dk, dv [B, K, nk, block_k, width] (or width, block_k), fp32.

    dq, dk_dv: what the results are added to (overwritten).  held: tiles of keys that a step holds.
    """
    B, N, _, block_q, H = x.q.shape
    _, K, nk, block_k, V = x.v.shape
    heads = N // K

    def block(*dims: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, held, *dims), lambda b, k, s: (b, k, s, *(0,) * len(dims)))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    shapes = [(H, block_k), (V, block_k)] if form.turned else [(block_k, H), (block_k, V)]
    given = [] if dk_dv is None else [block(*shape) for shape in shapes]
    in_specs = [
        pl.BlockSpec(
            (1, 1, 1, lists.shape[3]), lambda b, k, s: (b, s, 0, 0), memory_space=pltpu.SMEM
        ),
        *[anywhere] * 3,
        block(block_k, H),
        block(block_k, V),
        pl.BlockSpec((1, held, 2, block_k), lambda b, k, s: (b, s, 0, 0)),
        anywhere,
        *given,
    ]

    def kernel(agenda: Any, q: Any, dout: Any, rows: Any, k: Any, v: Any, marks: Any, *rest: Any) -> None:
        into, rest = rest[1 : 1 + len(given)], rest[1 + len(given) :]
        dq, dk, dv, *scratch, sems = rest
        refs = Refs(k.at[0, 0], v.at[0, 0], marks.at[0], dk.at[0, 0], dv.at[0, 0], *scratch)
        b, first_head = pl.program_id(0), pl.program_id(1) * heads
        pairs = [(q, refs.q), (dout, refs.dout), (rows, refs.rows), (dq, refs.dq)]

        def copies(head: Array, tile: Array, slot: Array) -> list[Any]:
            return [
                pltpu.make_async_copy(
                    there.at[b, first_head + head, tile], here.at[slot], sems.at[slot, n]
                )
                for n, (there, here) in enumerate(pairs)
            ]

        def back(head: Array, tile: Array, slot: Array) -> Any:
            there = dq.at[b, first_head + head, tile]
            return pltpu.make_async_copy(refs.dq.at[slot], there, sems.at[slot, len(pairs)])

        zero = jnp.int32(0)
        traffic = Traffic(
            lambda head, tile, slot: [copy.start() for copy in copies(head, tile, slot)] and None,
            lambda slot: [copy.wait() for copy in copies(zero, zero, slot)] and None,
            lambda head, tile, slot: back(head, tile, slot).start(),
            lambda slot: back(zero, zero, slot).wait(),
        )
        for n in range(held):
            refs.turned_k[n] = refs.k[n].T
        dk[...], dv[...] = jnp.zeros_like(dk), jnp.zeros_like(dv)
        run(refs, agenda, heads, traffic, form, tests)
        dk[...] = dk[...] * form.unscale
        for total, more in zip((dk, dv), into, strict=False):
            total[...] += more[...]

    tile = (block_k, block_q) if form.keys_down else (block_q, block_k)
    dtype = x.q.dtype
    scratch = [
        pltpu.VMEM((SLOTS, *x.q.shape[3:]), dtype),
        pltpu.VMEM((SLOTS, *x.dout.shape[3:]), dtype),
        pltpu.VMEM((SLOTS, ROWS, block_q), jnp.int32),
        pltpu.VMEM((SLOTS, *dq.shape[3:]), F32),
        pltpu.VMEM((held, H, block_k), dtype),
        pltpu.VMEM(tile, F32),
        pltpu.VMEM(tile, F32),
        pltpu.VMEM(tile, dtype),
        pltpu.VMEM(tile, dtype),
        pltpu.SemaphoreType.DMA((SLOTS, 5)),
    ]
    return pl.pallas_call(
        kernel,
        grid=(B, K, nk // held),
        in_specs=in_specs,
        out_specs=[anywhere, *(block(*shape) for shape in shapes)],
        out_shape=[like(x.q, dq.shape), *(like(x.q, (B, K, nk, *shape)) for shape in shapes)],
        scratch_shapes=scratch,
        input_output_aliases={7: 0} if dk_dv is None else {7: 0, 8: 1, 9: 2},
        **options,
    )(lists, x.q, x.dout, x.rows, x.k, x.v, x.marks, dq, *(dk_dv or ()))


def vmem(tiles: Tiles, H: int, V: int, itemsize: int) -> int:
    """Bytes of VMEM that a step takes: blocks that Pallas fetches ahead count twice."""
    bq, bk = tiles.block_q, tiles.block_k
    H, V = padded(H), padded(V)
    keys = bk * (H + V) * (2 * itemsize + 2 * 2 * 4) + bk * (H * itemsize + 2 * 8 * 4)
    unit = bq * bk * 2 * (4 + itemsize)
    stream = SLOTS * bq * ((H + V) * itemsize + (ROWS + H) * 4)
    return tiles.held * keys + unit + stream
