"""The backward kernel, run: all units of a step in order, tiles of queries in and dq out, and the call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringflash.attention.kernels.mosaic.agenda import AGENDA_TAIL, NEW, Tests, unpacked
from ringflash.attention.kernels.mosaic.backward import ROWS, Form, Refs, Unit, turn
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

    K and V may come in parts, as in the forward.
    """

    q: Array  # [B, N, nq, block_q, H], multiplied by `tile.query_factor`
    dout: Array  # [B, N, nq, block_q, V]
    rows: Array  # [B, N, nq, ROWS, block_q] int32: bits of lse log2(e) and delta, then lo, hi, segment
    marks: Array  # [B, nk, 2, block_k] int32: position, segment
    k: Sequence[Array]  # of [B / len(k), K, nk, block_k, H]
    v: Sequence[Array]  # of [B / len(v), K, nk, block_k, V]


class Traffic(NamedTuple):
    """Between HBM and the slots of `Refs`, for the heads of one key/value head."""

    pairs: list[tuple[Any, Any]]  # what is read: the whole array [heads, tiles, ...] and its slots
    dq: tuple[Any, Any]  # what is written back
    semaphores: Any

    def reading(self, head: Array, tile: Array, slot: Array) -> list[Any]:
        """The copies of a tile of queries into a slot."""
        pairs = [(there.at[head, tile], here.at[slot]) for there, here in self.pairs]
        return copies(pairs, self.semaphores.at[slot])

    def fetch(self, head: Array, tile: Array, slot: Array) -> None:
        """Start reading."""
        start(self.reading(head, tile, slot))

    def arrive(self, slot: Array) -> None:
        """Wait for what was started."""
        wait(self.reading(jnp.int32(0), jnp.int32(0), slot))

    def writing(self, head: Array, tile: Array, slot: Array) -> Any:
        """The copy of dq back."""
        there, here = self.dq
        semaphore = self.semaphores.at[slot, len(self.pairs)]
        return pltpu.make_async_copy(here.at[slot], there.at[head, tile], semaphore)

    def gone(self, slot: Array) -> None:
        """Wait until dq is back, so that the slot is free."""
        self.writing(jnp.int32(0), jnp.int32(0), slot).wait()


def run(refs: Refs, agenda: Any, heads: int, traffic: Traffic, form: Form, tests: Tests) -> None:
    """All units of a step: for each head the list. When this returns all dq are back in HBM."""
    length = (agenda.shape[-1] - AGENDA_TAIL) // 2
    count = agenda[0, 0, 0, 2 * length]

    def unit(at: Array, head: Array, fetched: Array) -> Unit:
        word = agenda[0, 0, 0, at]
        word = jnp.where(head < heads, word, word & ~NEW)
        return Unit(at, word, head, fetched + unpacked(word).new.astype(jnp.int32))

    def after(it: Unit) -> Unit:
        done = it.at == count - 1
        at, head = jnp.where(done, 0, it.at + 1), jnp.where(done, it.head + 1, it.head)
        return unit(at, head, it.fetched)

    def next_tile(it: Unit) -> None:
        next_slot = (it.fetched + 1) & (SLOTS - 1)
        ahead = agenda[0, 0, 0, length + it.at]
        tile = jnp.where(ahead < 0, unpacked(first.word).tile, ahead)
        head = jnp.where(ahead < 0, it.head + 1, it.head)

        def prefetch() -> None:
            pl.when(it.fetched + 1 > SLOTS)(lambda: traffic.gone(next_slot))
            traffic.fetch(head, tile, next_slot)

        pl.when(head < heads)(prefetch)
        traffic.arrive(it.slot)

    def one_turn(
        old: Unit | None, now: Unit | None, new: Unit | None, choice: tuple[str, ...]
    ) -> None:
        turn(refs, old, now, new, form, choice)

    def kind(now: Unit, new: Unit) -> Array:
        return unpacked(now.word).tests

    def stays(old: Unit, new: Unit) -> Array:
        return ~(unpacked(old.word).final | unpacked(new.word).new)

    def leave(it: Unit) -> None:
        fields = unpacked(it.word)
        pl.when(fields.final)(lambda: traffic.writing(it.head, fields.tile, it.slot).start())

    def end(last: Unit) -> None:
        for n in range(SLOTS):
            slot = (last.fetched - n) & (SLOTS - 1)
            pl.when(last.fetched > n)(partial(traffic.gone, slot))

    zero = jnp.int32(0)
    first = unit(zero, zero, zero)
    pl.when(count > 0)(lambda: traffic.fetch(zero, unpacked(first.word).tile, first.slot))
    stages = Stages(after, if_new(next_tile), one_turn, kind, stays, leave, end)
    pipelined(count * heads, first, stages, tests)


def backward(
    x: Inputs,
    dq: Array,
    dk_dv: tuple[Array, ...],
    *,
    lists: Array,
    tests: Tests,
    form: Form,
    held: int,
    options: dict[str, Any],
) -> tuple[Array, Array, Array]:
    """dq [B, N, nq, block_q, H], and dk, dv [B, K, nk * block_k, width] (turned: width before keys), fp32.

    dq, dk_dv: what the results are added to (overwritten); dk_dv may be empty.
    held: tiles of keys that a step holds.
    """
    B, N, _, block_q, H = x.q.shape
    in_part, K, nk, block_k, V = x.v[0].shape
    heads, steps = N // K, nk // held

    def made(width: int) -> pl.BlockSpec:
        keys = held * block_k
        if form.turned:
            return pl.BlockSpec((1, 1, width, keys), lambda b, k, s: (b, k, 0, s))
        return pl.BlockSpec((1, 1, keys, width), lambda b, k, s: (b, k, s, 0))

    def of_step(*dims: int, memory: Any = None) -> pl.BlockSpec:
        return pl.BlockSpec((1, *dims), lambda b, k, s: (b, s, 0, 0), memory_space=memory)

    def kernel(agenda: Any, q: Any, dout: Any, rows: Any, marks: Any, *rest: Any) -> None:
        k, v, (_, *into), (dq, dk, dv, *ours) = taken(rest, len(x.k), len(x.v), 1 + len(given))
        k_here, v_here, *scratch, for_keys, semaphores = ours
        b, kv_head, step = (pl.program_id(n) for n in range(3))

        def keys_of(part: int, row: Array, step: Array) -> list[Any]:
            its, slot = pl.ds(step * held, held), step & 1
            theirs = (xs[part].at[row, kv_head, its] for xs in (k, v))
            pairs = zip(theirs, (k_here.at[slot], v_here.at[slot]), strict=True)
            return copies(list(pairs), for_keys.at[slot])

        def fetch(step: Array) -> None:
            of_part(b, in_part, len(x.k), lambda part, row: start(keys_of(part, row, step)))

        pl.when(step == 0)(lambda: fetch(step))
        pl.when(step + 1 < steps)(lambda: fetch(step + 1))
        dk[...], dv[...] = jnp.zeros_like(dk), jnp.zeros_like(dv)
        wait(keys_of(0, jnp.int32(0), step))
        keys = k_here.at[step & 1], v_here.at[step & 1]
        refs = Refs(*keys, marks.at[0], dk.at[0, 0], dv.at[0, 0], *scratch)
        mine = pl.ds(kv_head * heads, heads)
        there = [ref.at[b, mine] for ref in (q, dout, rows, dq)]
        here = [refs.q, refs.dout, refs.rows, refs.dq]
        pairs = list(zip(there, here, strict=True))
        traffic = Traffic(pairs, pairs[-1], semaphores)
        for n in range(held):
            refs.turned_k[n] = refs.k[n].T
        run(refs, agenda, heads, traffic, form, tests)
        dk[...] = dk[...] * form.unscale
        for total, more in zip((dk, dv), into, strict=False):
            total[...] += more[...]

    S = nk * block_k
    shapes = [(B, K, width, S) if form.turned else (B, K, S, width) for width in (H, V)]
    given = [made(H), made(V)] if dk_dv else []
    tile = (block_k, block_q) if form.keys_down else (block_q, block_k)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    dtype = x.q.dtype
    operands = [*x.k, *x.v]
    at = 5 + len(operands)
    dq, dk, dv = pl.pallas_call(
        kernel,
        grid=(B, K, steps),
        in_specs=[
            of_step(1, 1, lists.shape[3], memory=pltpu.SMEM),
            *[anywhere] * 3,
            of_step(held, 2, block_k),
            *[anywhere] * (len(operands) + 1),
            *given,
        ],
        out_specs=[anywhere, made(H), made(V)],
        out_shape=[like(x.q, shape) for shape in (dq.shape, *shapes)],
        scratch_shapes=[
            pltpu.VMEM((2, held, block_k, H), dtype),
            pltpu.VMEM((2, held, block_k, V), dtype),
            pltpu.VMEM((SLOTS, block_q, H), dtype),
            pltpu.VMEM((SLOTS, block_q, V), dtype),
            pltpu.VMEM((SLOTS, ROWS, block_q), jnp.int32),
            pltpu.VMEM((SLOTS, block_q, H), F32),
            pltpu.VMEM((held, H, block_k), dtype),
            pltpu.VMEM(tile, F32),
            pltpu.VMEM(tile, F32),
            pltpu.VMEM(tile, dtype),
            pltpu.VMEM(tile, dtype),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SemaphoreType.DMA((SLOTS, 5)),
        ],
        input_output_aliases={at + n: n for n in range(1 + len(given))},
        **options,
    )(*in_hbm((lists, *x[:4], *operands, dq, *dk_dv), interpret=options["interpret"]))
    return dq, dk, dv


def vmem(tiles: Tiles, H: int, V: int, itemsize: int, given: bool) -> int:
    """Bytes of VMEM that a step takes: what is fetched a step ahead counts twice."""
    bq, bk = tiles.block_q, tiles.block_k
    H, V = padded(H), padded(V)
    keys = bk * (H + V) * (2 * itemsize + 2 * (2 if given else 1) * 4) + bk * (
        H * itemsize + 2 * 8 * 4
    )
    unit = bq * bk * 2 * (4 + itemsize)
    stream = SLOTS * bq * ((H + V) * itemsize + (ROWS + H) * 4)
    return tiles.held * keys + unit + stream
