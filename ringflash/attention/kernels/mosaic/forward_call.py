"""The forward kernel, run: all units of a step in order, copies of K and V ahead of them, and the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringflash.attention.kernels.mosaic.agenda import AGENDA_TAIL, NEW, Tests, unpacked
from ringflash.attention.kernels.mosaic.forward import Refs, Unit, begin, finish, turn
from ringflash.attention.kernels.mosaic.pipeline import (
    F32,
    SLOTS,
    Stages,
    copies,
    if_new,
    in_hbm,
    like,
    of_part,
    padded,
    pipelined,
    start,
    taken,
    wait,
)
from ringflash.attention.kernels.mosaic.tiles import Tiles

Array = jax.Array


class Inputs(NamedTuple):
    """What the kernel reads, tiled; from `calls.py`. Tiles of queries are nq, tiles of keys nk.

    K and V may come in parts, each some rows of the batch: what arrives apart is read where it lies.
    """

    q: Array  # [B, N, nq, block_q, H], multiplied by `tile.query_factor`
    rows: Array  # [B, nq, 3, block_q] int32: lo, hi, segment
    marks: Array  # [B, nk, 2, block_k] int32: position, segment
    k: Sequence[Array]  # of [B / len(k), K, nk, block_k, H]
    v: Sequence[Array]  # of [B / len(v), K, V, nk * block_k]


class Clock(NamedTuple):
    """What one step of a row tells the next, in SMEM: whether a tile is on its way, and how many came."""

    words: Any

    def reset(self) -> None:
        """At the first step of a row."""
        self.words[0] = self.words[1] = 0


def run(
    refs: Refs,
    agenda: Any,
    fetch: Callable[[Array, Array], None],
    arrive: Callable[[Array], None],
    clock: Clock,
    tests: Tests,
    softcap: float | None,
    chunk: int,
) -> None:
    """All units of a step. fetch(tile, slot) starts the copy of a tile of keys, arrive(slot) waits for it.

    A tile of keys serves all heads of the step before the next comes. The tile after the last one of this
    step, if a later step needs one, is on its way when this returns.
    """
    heads = refs.out.shape[0]
    length = (agenda.shape[-1] - AGENDA_TAIL) // 2
    units = agenda[0, 0, 0, 2 * length] * heads

    def unit(at: Array, head: Array, fetched: Array) -> Unit:
        word = agenda[0, 0, 0, at]
        word = jnp.where(head == 0, word, word & ~NEW)
        return Unit(at, word, head, fetched + unpacked(word).new.astype(jnp.int32))

    def after(it: Unit) -> Unit:
        done = it.head == heads - 1
        at, head = jnp.where(done, it.at + 1, it.at), jnp.where(done, 0, it.head + 1)
        return unit(at, head, it.fetched)

    def next_tile(it: Unit) -> None:
        ahead = agenda[0, 0, 0, length + it.at]
        pl.when(ahead >= 0)(lambda: fetch(ahead, (it.fetched + 1) & (SLOTS - 1)))
        arrive(it.slot)

    def one_turn(
        old: Unit | None, now: Unit | None, new: Unit | None, choice: tuple[str, ...]
    ) -> None:
        turn(refs, old, now, new, choice, softcap, chunk)

    def kind(now: Unit, new: Unit) -> Array:
        return unpacked(new.word).tests

    def stays(old: Unit, new: Unit) -> Array:
        return ~unpacked(new.word).new

    def end(last: Unit) -> None:
        clock.words[1] = last.fetched

    zero = jnp.int32(0)
    first = unit(zero, zero, clock.words[1])

    @pl.when((units > 0) & (clock.words[0] == 0))
    def first_tile() -> None:
        fetch(unpacked(first.word).tile, first.slot)
        clock.words[0] = 1

    stages = Stages(after, if_new(next_tile), one_turn, kind, stays, lambda _: None, end)
    pipelined(units, first, stages, tests)


def forward(
    x: Inputs,
    carried: tuple[Array, ...],
    *,
    lists: Array,
    tests: Tests,
    softcap: float | None,
    heads: int,
    sub: int,
    chunk: int,
    options: dict[str, Any],
) -> tuple[Array, Array]:
    """out [B, N, V, nq * block_q] and lse [B, N, 1, nq * block_q], fp32, on from `carried` (overwritten,
    may be empty).

    heads, sub: query heads of one key/value head, and tiles of queries, that a step holds.
    """
    B, N, nq, block_q, H = x.q.shape
    in_part, K, V, _ = x.v[0].shape
    block_k = x.k[0].shape[3]
    parts = N // K // heads

    def held(width: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, heads, width, sub * block_q), lambda b, k, p, s: (b, k * parts + p, 0, s)
        )

    def of_step(*dims: int, memory: Any = None) -> pl.BlockSpec:
        return pl.BlockSpec((1, *dims), lambda b, k, p, s: (b, s, 0, 0), memory_space=memory)

    def kernel(agenda: Any, q: Any, rows: Any, marks: Any, *rest: Any) -> None:
        k, v, given, (out, lse, *scratch, semaphores, words) = taken(
            rest, len(x.k), len(x.v), len(state)
        )
        refs = Refs(q.at[0], rows.at[0], out.at[0], lse.at[0], *scratch)
        b, kv_head, clock = pl.program_id(0), pl.program_id(1), Clock(words)

        def of_tile(part: int, row: Array, tile: Array, slot: Array) -> list[Any]:
            its = pl.ds(pl.multiple_of(tile * block_k, block_k), block_k)
            k_tile, v_tile = k[part].at[row, kv_head, tile], v[part].at[row, kv_head, :, its]
            targets = (ref.at[slot] for ref in (refs.k, refs.v, refs.marks))
            pairs = zip((k_tile, v_tile, marks.at[b, tile]), targets, strict=True)
            return copies(list(pairs), semaphores.at[slot])

        def fetch(tile: Array, slot: Array) -> None:
            of_part(b, in_part, len(x.k), lambda part, row: start(of_tile(part, row, tile, slot)))

        def arrive(slot: Array) -> None:
            wait(of_tile(0, jnp.int32(0), jnp.int32(0), slot))

        pl.when(pl.program_id(3) == 0)(clock.reset)
        begin(refs, tuple(ref.at[0] for ref in given))
        run(refs, agenda, fetch, arrive, clock, tests, softcap, chunk)
        finish(refs)

    state = [held(V), held(1)] if carried else []
    operands = [*x.k, *x.v]
    at = 4 + len(operands)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    shapes = [(B, N, V, nq * block_q), (B, N, 1, nq * block_q)]
    out, lse = pl.pallas_call(
        kernel,
        grid=(B, K, parts, nq // sub),
        in_specs=[
            of_step(1, 1, lists.shape[3], memory=pltpu.SMEM),
            pl.BlockSpec(
                (1, heads, sub, block_q, H), lambda b, k, p, s: (b, k * parts + p, s, 0, 0)
            ),
            of_step(sub, 3, block_q),
            *[anywhere] * (1 + len(operands)),
            *state,
        ],
        out_specs=[held(V), held(1)],
        out_shape=[like(x.q, shape) for shape in shapes],
        scratch_shapes=[
            pltpu.VMEM((SLOTS, block_k, H), x.k[0].dtype),
            pltpu.VMEM((SLOTS, V, block_k), x.v[0].dtype),
            pltpu.VMEM((SLOTS, 2, block_k), jnp.int32),
            pltpu.VMEM((block_k, block_q), F32),
            pltpu.VMEM((block_k, block_q), x.v[0].dtype),
            pltpu.VMEM((heads, sub, 1, block_q), F32),
            pltpu.VMEM((heads, sub, 8, block_q), F32),
            pltpu.VMEM((8, block_q), F32),
            pltpu.VMEM((1, block_q), F32),
            pltpu.SemaphoreType.DMA((SLOTS, 3)),
            pltpu.SMEM((2,), jnp.int32),
        ],
        input_output_aliases={at: 0, at + 1: 1} if carried else {},
        **options,
    )(
        *in_hbm((lists, x.q, x.rows, x.marks, *operands, *carried), interpret=options["interpret"]),
    )
    return out, lse


def vmem(tiles: Tiles, H: int, V: int, itemsize: int, carried: bool) -> int:
    """Bytes of VMEM that a step takes: blocks that Pallas fetches ahead count twice."""
    bq, bk = tiles.block_q, tiles.block_k
    H, V = padded(H), padded(V)
    place = 2 * bq * H * itemsize + 2 * (2 if carried else 1) * bq * (V + 8) * 4 + 16 * bq * 4
    unit = bq * bk * (4 + itemsize)
    stream = SLOTS * bk * ((H + V) * itemsize + 8 * 4)
    return tiles.held * place + unit + stream
