"""The backward kernel, run: all units of a step in order, tiles of queries in and dq out, and the call."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringflash.attention.kernels.mosaic.agenda import AGENDA_TAIL, Tests, unpacked
from ringflash.attention.kernels.mosaic.backward import ROWS, Form, Refs, Unit, turn
from ringflash.attention.kernels.mosaic.pipeline import (
    F32,
    SLOTS,
    at_ends,
    by_kind,
    copies,
    drive,
    like,
    padded,
)
from ringflash.attention.kernels.mosaic.tiles import Tiles

Array = jax.Array


class Inputs(NamedTuple):
    """What the kernel reads, tiled; from `tpu.py`. Tiles of queries are nq, tiles of keys nk."""

    q: Array  # [B, N, nq, block_q, H], multiplied by `tile.query_factor`
    dout: Array  # [B, N, nq, block_q, V]
    rows: Array  # [B, N, nq, ROWS, block_q] int32: bits of lse log2(e) and delta, then lo, hi, segment
    k: Array  # [B, K, nk, block_k, H]
    v: Array  # [B, K, nk, block_k, V]
    marks: Array  # [B, nk, 2, block_k] int32


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
        for copy in self.reading(head, tile, slot):
            copy.start()

    def arrive(self, slot: Array) -> None:
        """Wait for what was started."""
        for copy in self.reading(jnp.int32(0), jnp.int32(0), slot):
            copy.wait()

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

    def advance(state: tuple[Array, Array, Array]) -> tuple[Unit, tuple[Array, Array, Array]]:
        place, head, fetched = state
        tile, held, choice, new, final = unpacked(agenda[0, 0, 0, place])
        new &= head < heads

        def next_tile() -> None:
            slot, next_slot = (fetched + 1) & (SLOTS - 1), (fetched + 2) & (SLOTS - 1)
            ahead = agenda[0, 0, 0, length + place]
            first, *_ = unpacked(agenda[0, 0, 0, 0])
            after = jnp.where(ahead < 0, first, ahead)
            its_head = jnp.where(ahead < 0, head + 1, head)

            def prefetch() -> None:
                pl.when(fetched + 2 > SLOTS)(lambda: traffic.gone(next_slot))
                traffic.fetch(its_head, after, next_slot)

            pl.when(fetched == 0)(lambda: traffic.fetch(head, tile, slot))
            pl.when(its_head < heads)(prefetch)
            traffic.arrive(slot)

        pl.when(new)(next_tile)
        fetched = fetched + new.astype(jnp.int32)
        done = place == count - 1
        state = jnp.where(done, 0, place + 1), jnp.where(done, head + 1, head), fetched
        return Unit(head, tile, held, fetched, final, choice), state

    def one_turn(old: Unit | None, now: Unit | None, new: Unit | None) -> None:
        def with_tests(choice: tuple[str, ...]) -> None:
            turn(refs, old, now, new, form, choice)

        if now is None:
            with_tests(())
        else:
            at_end = old is None or new is None  # these turns need not be the quickest
            by_kind(at_ends(tests) if at_end else tests, now.tests, with_tests)
        if old is not None:
            pl.when(old.final)(lambda: traffic.writing(old.head, old.tile, old.slot).start())

    def end(last: Unit) -> None:
        for n in range(SLOTS):
            slot = (last.fetched - n) & (SLOTS - 1)
            pl.when(last.fetched > n)(partial(traffic.gone, slot))

    zero = jnp.int32(0)
    drive(count * heads, (zero, zero, zero), advance, one_turn, end)


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
    """dq [B, N, nq, block_q, H], and dk, dv [B, K, nk, block_k, width] (or width, block_k), fp32.

    dq, dk_dv: what the results are added to (overwritten); dk_dv may be empty.
    held: tiles of keys that a step holds.
    """
    B, N, _, block_q, H = x.q.shape
    _, K, nk, block_k, V = x.v.shape
    heads = N // K

    def block(*dims: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, held, *dims), lambda b, k, s: (b, k, s, *(0,) * len(dims)))

    def of_step(*dims: int, memory: Any = None) -> pl.BlockSpec:
        return pl.BlockSpec((1, *dims), lambda b, k, s: (b, s, 0, 0), memory_space=memory)

    def kernel(
        agenda: Any, q: Any, dout: Any, rows: Any, k: Any, v: Any, marks: Any, *rest: Any
    ) -> None:
        into, (dq, dk, dv, *scratch, semaphores) = rest[1 : len(given) + 1], rest[len(given) + 1 :]
        refs = Refs(k.at[0, 0], v.at[0, 0], marks.at[0], dk.at[0, 0], dv.at[0, 0], *scratch)
        mine = pl.ds(pl.program_id(1) * heads, heads)
        there = [ref.at[pl.program_id(0), mine] for ref in (q, dout, rows, dq)]
        here = [refs.q, refs.dout, refs.rows, refs.dq]
        pairs = list(zip(there, here, strict=True))
        traffic = Traffic(pairs, pairs[-1], semaphores)
        for n in range(held):
            refs.turned_k[n] = refs.k[n].T
        dk[...], dv[...] = jnp.zeros_like(dk), jnp.zeros_like(dv)
        run(refs, agenda, heads, traffic, form, tests)
        dk[...] = dk[...] * form.unscale
        for total, more in zip((dk, dv), into, strict=False):
            total[...] += more[...]

    shapes = [(H, block_k), (V, block_k)] if form.turned else [(block_k, H), (block_k, V)]
    given = [block(*shape) for shape in shapes] if dk_dv else []
    tile = (block_k, block_q) if form.keys_down else (block_q, block_k)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    dtype = x.q.dtype
    dq, dk, dv = pl.pallas_call(
        kernel,
        grid=(B, K, nk // held),
        in_specs=[
            of_step(1, 1, lists.shape[3], memory=pltpu.SMEM),
            *[anywhere] * 3,
            block(block_k, H),
            block(block_k, V),
            of_step(held, 2, block_k),
            anywhere,
            *given,
        ],
        out_specs=[anywhere, *(block(*shape) for shape in shapes)],
        out_shape=[like(x.q, dq.shape), *(like(x.q, (B, K, nk, *shape)) for shape in shapes)],
        scratch_shapes=[
            pltpu.VMEM((SLOTS, block_q, H), dtype),
            pltpu.VMEM((SLOTS, block_q, V), dtype),
            pltpu.VMEM((SLOTS, ROWS, block_q), jnp.int32),
            pltpu.VMEM((SLOTS, block_q, H), F32),
            pltpu.VMEM((held, H, block_k), dtype),
            pltpu.VMEM(tile, F32),
            pltpu.VMEM(tile, F32),
            pltpu.VMEM(tile, dtype),
            pltpu.VMEM(tile, dtype),
            pltpu.SemaphoreType.DMA((SLOTS, 5)),
        ],
        input_output_aliases={7: 0, 8: 1, 9: 2} if dk_dv else {7: 0},
        **options,
    )(lists, x.q, x.dout, x.rows, x.k, x.v, x.marks, dq, *dk_dv)
    return dq, dk, dv


def vmem(tiles: Tiles, H: int, V: int, itemsize: int) -> int:
    """Bytes of VMEM that a step takes: blocks that Pallas fetches ahead count twice."""
    bq, bk = tiles.block_q, tiles.block_k
    H, V = padded(H), padded(V)
    keys = bk * (H + V) * (2 * itemsize + 2 * 2 * 4) + bk * (H * itemsize + 2 * 8 * 4)
    unit = bq * bk * 2 * (4 + itemsize)
    stream = SLOTS * bq * ((H + V) * itemsize + (ROWS + H) * 4)
    return tiles.held * keys + unit + stream
