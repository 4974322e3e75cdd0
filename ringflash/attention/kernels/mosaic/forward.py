"""The forward kernel: a software pipeline of three stages over the units of an agenda.

A unit is block_q queries of one head against block_k keys. While the matrix units add V P of one unit to its
sum (`gather`) and make the scores of the next but one (`score`), the vector units turn the scores of the one
between into weights (`soften`). No stage needs what another makes in the same turn, so the compiler overlaps
them; all that passes from turn to turn lies in VMEM, so each turn may take another body (with other tests).

Scores are [keys, queries]: maxima and sums run down the registers, statistics are rows, and the product with
V streams D rows, which fills a 256 x 256 array at D = 128. Scores are in base 2 (`tile.query_factor`).
FlashAttention-2 (arXiv:2307.08691, algorithm 1) with the queries of a group of heads beside each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringflash.attention.kernel import FLOOR
from ringflash.attention.kernels.mosaic.agenda import Tests, unpacked
from ringflash.attention.kernels.mosaic.tiles import LANES, Tiles
from ringflash.attention.tile import LOG2E, hidden, in_base_2, seen

Array = jax.Array
F32 = jnp.float32
SLOTS = 4  # V of a tile is used up to two turns after K, while the next is fetched: four may be alive


class Refs(NamedTuple):
    """What a step holds: its block of queries (heads x tiles), and scratch."""

    q: Any  # [heads, tiles, block_q, H]
    rows: Any  # [tiles, 3, block_q] int32: lo, hi, segment
    out: Any  # [heads, tiles, V, block_q] fp32
    lse: Any  # [heads, tiles, 1, block_q] fp32
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
    """A unit on its way: its head and its tile of queries, and how many tiles of keys were fetched up to its own."""

    head: Array
    tile: Array
    fetched: Array

    @property
    def place(self) -> tuple[Array, Array]:
        """Where its state lies."""
        return self.head, self.tile

    @property
    def slot(self) -> Array:
        """Where its keys lie."""
        return self.fetched & (SLOTS - 1)


def dot(a: Array, b: Array, a_dim: int, b_dim: int) -> Array:
    """The product over a_dim and b_dim, in fp32; exact products where the inputs are fp32."""
    exact = lax.Precision.HIGHEST if a.dtype == F32 else None
    dims = (((a_dim,), (b_dim,)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=F32, precision=exact)


def columns_of(width: int, chunk: int) -> list[slice]:
    """`width` in slices of at most `chunk`."""
    return [slice(at, min(at + chunk, width)) for at in range(0, width, chunk)]


def columns(rows: Array) -> tuple[Array, Array]:
    """The rows of [2, n] as columns [n, 1]."""
    turned = jnp.concatenate([rows] * 4).T  # a whole register of rows
    return turned[:, 0:1], turned[:, 1:2]


def score(
    refs: Refs,
    unit: Unit,
    marks: tuple[Array, Array],
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
    refs.out[(*unit.place, slice(None), at)] = refs.out[(*unit.place, slice(None), at)] * shrink[:, at] + more


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
    marks = columns(refs.marks[new.slot]) if new is not None else None
    for at in columns_of(block_q, chunk):
        if old is not None:
            gather(refs, old, gathered, at)
        if now is not None:
            soften(refs, now, top, shrink, at)
        if new is not None:
            score(refs, new, marks, tests, softcap, at)


def each_place(refs: Refs, do: Callable[[tuple[Any, Any]], None]) -> None:
    """`do` for every head and tile of queries that the step holds."""
    heads, tiles = refs.out.shape[:2]

    @pl.loop(0, heads)
    def _(head: Array) -> None:
        for tile in range(tiles):
            do((head, tile))


def begin(refs: Refs, carried: tuple[Any, Any] | None) -> None:
    """The state at the start: empty, or what was carried in."""
    first = lax.broadcasted_iota(jnp.int32, refs.total.shape[2:], 0) == 0

    def empty(place: tuple[Any, Any]) -> None:
        refs.out[place] = jnp.zeros(refs.out.shape[2:], F32)
        refs.top[place] = jnp.full(refs.top.shape[2:], FLOOR, F32)
        refs.total[place] = jnp.zeros(refs.total.shape[2:], F32)

    def go_on(place: tuple[Any, Any]) -> None:
        assert carried is not None
        out, lse = carried
        some = lse[place] > FLOOR / 2
        refs.out[place] = out[place]
        refs.top[place] = jnp.where(some, lse[place] * LOG2E, FLOOR)
        refs.total[place] = jnp.where(first & some, 1.0, 0.0)

    each_place(refs, empty if carried is None else go_on)


def finish(refs: Refs) -> None:
    """out and lse; an empty row has out 0 and lse FLOOR."""

    def one(place: tuple[Any, Any]) -> None:
        total = refs.total[place].sum(0, keepdims=True)
        some = total > 0
        share = jnp.where(some, 1.0 / jnp.where(some, total, 1.0), 0.0)
        refs.out[place] = refs.out[place] * share
        lse = (refs.top[place] + jnp.log2(jnp.where(some, total, 1.0))) / LOG2E
        refs.lse[place] = jnp.where(some, lse, FLOOR)

    each_place(refs, one)


def by_kind(tests: Tests, kind: Array, do: Callable[[tuple[str, ...]], None]) -> None:
    """`do` with the tests of that kind; kinds beyond the last choice take it."""
    for n, choice in enumerate(tests.choices):
        ours = kind == n if n < len(tests.choices) - 1 else kind >= n
        pl.when(ours)(lambda choice=choice: do(choice))


def run(
    refs: Refs,
    agenda: Any,
    heads: int,
    fetch: Callable[[Array, Array], None],
    arrive: Callable[[Array], None],
    clock: Any,
    tests: Tests,
    softcap: float | None,
    chunk: int,
) -> None:
    """All units of a step. `fetch(tile, slot)` starts the copy of a tile, `arrive(slot)` waits for it."""
    length = (agenda.shape[-1] - 128) // 2
    units = agenda[0, 0, 0, 2 * length] * heads
    ends = Tests((tests.choices[0], tests.choices[-1]))  # the first turns need not be the quickest

    def next_unit(place: Array, head: Array, fetched: Array) -> tuple[Unit, Array]:
        """The unit at a place of the list; if it is the first of a tile, the tile is there when this returns."""
        tile, lane, kind, new, _ = unpacked(agenda[0, 0, 0, place])
        is_new = new & (head == 0)
        slot, next_slot = (fetched + 1) & (SLOTS - 1), (fetched + 2) & (SLOTS - 1)

        @pl.when(is_new)
        def _() -> None:
            ahead = agenda[0, 0, 0, length + place]

            @pl.when(clock[0] == 0)
            def _() -> None:
                fetch(tile, slot)

            clock[0] = 1
            arrive(slot)

            @pl.when(ahead >= 0)
            def _() -> None:
                fetch(ahead, next_slot)

        fetched = fetched + is_new.astype(jnp.int32)
        return Unit(head, lane, fetched), kind

    def onward(place: Array, head: Array) -> tuple[Array, Array]:
        done = head == heads - 1
        return jnp.where(done, place + 1, place), jnp.where(done, 0, head + 1)

    @pl.when(units > 0)
    def _() -> None:
        zero = jnp.int32(0)
        first, kind = next_unit(zero, zero, clock[1])
        by_kind(ends, kind, lambda tests: turn(refs, None, None, first, tests, softcap, chunk))
        place, head = onward(zero, zero)
        second, kind = next_unit(place, head, first.fetched)
        by_kind(ends, kind, lambda tests: turn(refs, None, first, second, tests, softcap, chunk))

        def body(_: Array, state: Any) -> Any:
            old, now, place, head = state
            place, head = onward(place, head)
            new, kind = next_unit(place, head, now.fetched)
            by_kind(tests, kind, lambda tests: turn(refs, old, now, new, tests, softcap, chunk))
            return now, new, place, head

        old, now, _, _ = lax.fori_loop(2, units, body, (first, second, place, head))

        @pl.when(units > 1)
        def _() -> None:
            turn(refs, old, now, None, (), softcap, chunk)

        last = jax.tree.map(lambda a, b: jnp.where(units > 1, a, b), now, first)
        turn(refs, last, None, None, (), softcap, chunk)
        clock[1] = last.fetched


class Inputs(NamedTuple):
    """What the kernel reads, tiled; from `tpu.py`. Tiles of queries are nq, tiles of keys nk."""

    q: Array  # [B, N, nq, block_q, H], multiplied by `tile.query_factor`
    k: Array  # [B, K, nk, block_k, H]
    v: Array  # [B, K, nk, V, block_k]
    rows: Array  # [B, nq, 3, block_q] int32
    marks: Array  # [B, nk, 2, block_k] int32


def forward(
    x: Inputs,
    carried: tuple[Array, Array] | None,
    *,
    lists: Array,
    tests: Tests,
    softcap: float | None,
    heads: int,
    sub: int,
    chunk: int,
    options: dict[str, Any],
) -> tuple[Array, Array]:
    """out [B, N, nq, V, block_q] and lse [B, N, nq, 1, block_q], fp32, on from `carried` (overwritten).

    heads, sub: query heads of one key/value head, and tiles of queries, that a step holds.
    """
    B, N, nq, block_q, _ = x.q.shape
    K, block_k, V = x.k.shape[1], x.k.shape[3], x.v.shape[3]
    parts = N // K // heads

    def held(*dims: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, heads, sub, *dims), lambda b, k, p, s: (b, k * parts + p, s, *(0,) * len(dims))
        )

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out_specs = [held(V, block_q), held(1, block_q)]
    in_specs = [
        pl.BlockSpec(
            (1, 1, 1, lists.shape[3]), lambda b, k, p, s: (b, s, 0, 0), memory_space=pltpu.SMEM
        ),
        held(block_q, x.q.shape[4]),
        pl.BlockSpec((1, sub, 3, block_q), lambda b, k, p, s: (b, s, 0, 0)),
        *[anywhere] * 3,
        *([] if carried is None else out_specs),
    ]

    def kernel(agenda: Any, q: Any, rows: Any, k: Any, v: Any, marks: Any, *rest: Any) -> None:
        given, rest = (None, rest) if carried is None else (rest[:2], rest[2:])
        out, lse, *scratch, sems, clock = rest
        refs = Refs(q.at[0], rows.at[0], out.at[0], lse.at[0], *scratch)
        b, kv_head = pl.program_id(0), pl.program_id(1)

        @pl.when(pl.program_id(3) == 0)
        def _() -> None:
            clock[0] = clock[1] = 0

        def copies(tile: Array, slot: Array) -> list[Any]:
            pairs = [
                (k.at[b, kv_head, tile], refs.k),
                (v.at[b, kv_head, tile], refs.v),
                (marks.at[b, tile], refs.marks),
            ]
            return [
                pltpu.make_async_copy(source, into.at[slot], sems.at[slot, n])
                for n, (source, into) in enumerate(pairs)
            ]

        def fetch(tile: Array, slot: Array) -> None:
            for copy in copies(tile, slot):
                copy.start()

        def arrive(slot: Array) -> None:
            for copy in copies(jnp.int32(0), slot):
                copy.wait()

        begin(refs, None if given is None else tuple(x.at[0] for x in given))
        run(refs, agenda, heads, fetch, arrive, clock, tests, softcap, chunk)
        finish(refs)

    unit = (block_k, block_q)
    scratch = [
        pltpu.VMEM((SLOTS, *x.k.shape[3:]), x.k.dtype),
        pltpu.VMEM((SLOTS, *x.v.shape[3:]), x.v.dtype),
        pltpu.VMEM((SLOTS, 2, block_k), jnp.int32),
        pltpu.VMEM(unit, F32),
        pltpu.VMEM(unit, x.v.dtype),
        pltpu.VMEM((heads, sub, 1, block_q), F32),
        pltpu.VMEM((heads, sub, 8, block_q), F32),
        pltpu.VMEM((8, block_q), F32),
        pltpu.VMEM((1, block_q), F32),
        pltpu.SemaphoreType.DMA((SLOTS, 3)),
        pltpu.SMEM((2,), jnp.int32),
    ]
    shapes = [(B, N, nq, V, block_q), (B, N, nq, 1, block_q)]
    return pl.pallas_call(
        kernel,
        grid=(B, K, parts, nq // sub),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[like(x.q, shape) for shape in shapes],
        scratch_shapes=scratch,
        input_output_aliases={} if carried is None else {6: 0, 7: 1},
        **options,
    )(lists, x.q, x.rows, x.k, x.v, x.marks, *(() if carried is None else carried))


def like(x: Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """fp32 of that shape, varying over the mesh axes that x varies over."""
    return jax.ShapeDtypeStruct(shape, F32, manual_axis_type=jax.typeof(x).manual_axis_type)


def vmem(tiles: Tiles, H: int, V: int, itemsize: int, carried: bool) -> int:
    """Bytes of VMEM that a step takes: blocks that Pallas fetches ahead count twice."""
    bq, bk = tiles.block_q, tiles.block_k
    H, V = padded(H), padded(V)
    place = 2 * bq * H * itemsize + 2 * (2 if carried else 1) * bq * (V + 8) * 4 + 16 * bq * 4
    unit = bq * bk * (4 + itemsize)
    stream = SLOTS * bk * ((H + V) * itemsize + 8 * 4)
    return tiles.held * place + unit + stream


def padded(width: int) -> int:
    """The width as it lies in VMEM."""
    return -(-width // LANES) * LANES
