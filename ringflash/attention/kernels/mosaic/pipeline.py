"""What the forward and the backward kernel share: a pipeline of three stages over the units of an agenda.

In each turn three units are on their way, each in another stage. No stage needs what another makes in the
same turn, so the compiler lays matrix, vector and exponent units over each other. What passes from turn to
turn lies in VMEM, so that every turn may take another body, with the tests that its unit needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringflash.attention.kernels.mosaic.agenda import Tests, unpacked
from ringflash.attention.kernels.mosaic.tiles import LANES

Array = jax.Array
F32 = jnp.float32
# A streamed tile is used up to two turns after it came, while the next one is on its way: four may be alive.
SLOTS = 4


class Stages(NamedTuple):
    """What a kernel does with units on their way; `pipelined` says when."""

    after: Callable[[Any], Any]  # the next unit; also of the last one, where that is never used
    arrive: Callable[[Any], None]  # what the unit brings with it; before its first turn
    turn: Callable[..., Any]  # (old, now, new, choice of tests)
    kind: Callable[[Any, Any], Array]  # of (now, new): which choice
    stays: Callable[[Any, Any], Array]  # of (old, new): nothing to do between turns
    leave: Callable[[Any], None]  # after its last turn
    end: Callable[[Any], None]  # after all


def pipelined(units: Array, first: Any, stages: Stages, tests: Tests) -> None:
    """All units in order, three at a time; None where the pipeline fills or drains.

    Turns of one kind that follow one another, and where no unit comes with a tile or leaves one, are a loop
    of one block each: every branch costs a turn a dozen idle cycles.
    """
    after, arrive, turn, kind, stays, leave, end = stages
    every = tests.choices[
        -1
    ]  # where turns need not be the quickest: code is what a slice waits for first

    def run_of(i: Array, gone: Any, old: Any, now: Any, new: Any, choice: tuple[str, ...]) -> Any:
        """Turns of one kind."""
        its = kind(now, new)

        def one(state: Any) -> Any:
            i, _, old, now, new, _ = state
            turn(old, now, new, choice)
            then = after(new)
            more = (i + 1 < units) & stays(old, then) & (kind(new, then) == its)
            return i + 1, old, now, new, then, more

        def more(state: Any) -> Any:
            return state[-1]

        return lax.while_loop(more, one, (i, gone, old, now, new, jnp.array(True)))[:-1]

    def runs(state: Any) -> Any:
        *_, now, new = state
        arrive(new)
        state = by_kind(tests, kind(now, new), partial(run_of, *state))
        leave(state[1])
        return state

    def all_turns() -> None:
        arrive(first)
        turn(None, None, first, every)
        second = after(first)
        arrive(second)
        turn(None, first, second, every)
        start = jnp.int32(2), first, first, second, after(second)
        _, _, old, now, _ = lax.while_loop(lambda state: state[0] < units, runs, start)

        def drain() -> None:
            turn(old, now, None, every)
            leave(old)

        pl.when(units > 1)(drain)
        last = jax.tree.map(lambda a, b: jnp.where(units > 1, a, b), now, first)
        turn(last, None, None, ())
        leave(last)
        end(last)

    pl.when(units > 0)(all_turns)


def if_new(next_tile: Callable[[Any], None]) -> Callable[[Any], None]:
    """next_tile(unit) where the unit's streamed tile comes with it."""

    def arrive(unit: Any) -> None:
        pl.when(unpacked(unit.word).new)(lambda: next_tile(unit))

    return arrive


def by_kind(tests: Tests, kind: Array, do: Callable[[tuple[str, ...]], Any]) -> Any:
    """`do` with the tests of that kind."""
    return lax.switch(kind, [partial(do, choice) for choice in tests.choices])


def dot(a: Array, b: Array, a_dim: int, b_dim: int) -> Array:
    """The product over a_dim and b_dim, in fp32; exact products where the inputs are fp32."""
    exact = lax.Precision.HIGHEST if a.dtype == F32 else None
    dims = (((a_dim,), (b_dim,)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=F32, precision=exact)


def columns(rows: Array, count: int) -> list[Array]:
    """The first rows of [n, length] as columns [length, 1]; n divides the eight rows of a register."""
    turned = jnp.concatenate([rows] * (8 // rows.shape[0])).T
    return [turned[:, n : n + 1] for n in range(count)]


def chunks(width: int, chunk: int) -> list[slice]:
    """`width` in slices of at most `chunk`."""
    return [slice(at, min(at + chunk, width)) for at in range(0, width, chunk)]


def copies(pairs: list[tuple[Any, Any]], semaphores: Any) -> list[Any]:
    """Copies from the one to the other of each pair, to be started or waited for."""
    return [
        pltpu.make_async_copy(source, target, semaphores.at[n])
        for n, (source, target) in enumerate(pairs)
    ]


def of_part(row: Array, rows: int, parts: int, do: Callable[[int, Array], None]) -> None:
    """do(part, row in it) for the part that holds the row, of an array in `parts` of `rows` each."""
    if parts == 1:
        do(0, row)
        return
    for part in range(parts):
        first = part * rows
        pl.when((first <= row) & (row < first + rows))(partial(do, part, row - first))


def taken(refs: Sequence[Any], *counts: int) -> list[Any]:
    """So many of the refs at a time, and in the end what is left."""
    ends = [0, *accumulate(counts), len(refs)]
    return [refs[a:b] for a, b in pairwise(ends)]


def start(moves: Sequence[Any]) -> None:
    """Start all of these copies."""
    for move in moves:
        move.start()


def wait(moves: Sequence[Any]) -> None:
    """Wait for all of them."""
    for move in moves:
        move.wait()


def in_hbm(xs: Sequence[Array], *, interpret: Any) -> list[Array]:
    """The operands of a kernel, kept in HBM. Where XLA may bring one to VMEM before a call, calls differ, and
    each is compiled; in a ring it would wait for a transfer that is to go on meanwhile."""
    if interpret:  # which knows no memories
        return list(xs)
    # Together: JAX moves what depends on no layer out of a scan over layers, and there it can make no array
    # that has a memory. What is behind the barrier depends on the queries, and stays.
    together = lax.optimization_barrier(list(xs))
    return [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in together]


def like(x: Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """fp32 of that shape, varying over the mesh axes that x varies over."""
    return jax.ShapeDtypeStruct(shape, F32, manual_axis_type=jax.typeof(x).manual_axis_type)


def padded(width: int) -> int:
    """A head width as it lies in VMEM."""
    return -(-width // LANES) * LANES
