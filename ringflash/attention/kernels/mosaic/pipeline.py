"""What the forward and the backward kernel share: a pipeline of three stages over the units of an agenda.

In each turn three units are on their way, each in another stage. No stage needs what another makes in the
same turn, so the compiler lays matrix, vector and exponent units over each other. What passes from turn to
turn lies in VMEM, so that every turn may take another body, with the tests that its unit needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringflash.attention.kernels.mosaic.agenda import Tests
from ringflash.attention.kernels.mosaic.tiles import LANES

Array = jax.Array
F32 = jnp.float32
# A streamed tile is used up to two turns after it came, while the next one is on its way: four may be alive.
SLOTS = 4


def drive(
    units: Array,
    start: Any,
    advance: Callable[[Any], tuple[Any, Any]],
    turn: Callable[[Any, Any, Any], None],
    end: Callable[[Any], None],
) -> None:
    """turn(old, now, new) for all units in order, with None where the pipeline fills or drains.

    advance(state) gives the next unit and the state after it; it may be asked for one unit more than there
    are, if there is one.  end(last unit) comes last.  Nothing is called where there are no units.
    """

    def all_turns() -> None:
        first, state = advance(start)
        turn(None, None, first)
        second, state = advance(state)
        turn(None, first, second)

        def body(_: Array, carried: Any) -> Any:
            old, now, state = carried
            new, state = advance(state)
            turn(old, now, new)
            return now, new, state

        old, now, _ = lax.fori_loop(2, units, body, (first, second, state))
        pl.when(units > 1)(lambda: turn(old, now, None))
        last = jax.tree.map(lambda a, b: jnp.where(units > 1, a, b), now, first)
        turn(last, None, None)
        end(last)

    pl.when(units > 0)(all_turns)


def by_kind(tests: Tests, kind: Array, do: Callable[[tuple[str, ...]], None]) -> None:
    """`do` with the tests of that kind; kinds beyond the last choice take it."""
    for n, choice in enumerate(tests.choices):
        ours = kind == n if n < len(tests.choices) - 1 else kind >= n
        pl.when(ours)(partial(do, choice))


def at_ends(tests: Tests) -> Tests:
    """None or all: enough where turns are few."""
    return Tests((tests.choices[0], tests.choices[-1]))


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


def like(x: Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """fp32 of that shape, varying over the mesh axes that x varies over."""
    return jax.ShapeDtypeStruct(shape, F32, manual_axis_type=jax.typeof(x).manual_axis_type)


def padded(width: int) -> int:
    """A head width as it lies in VMEM."""
    return -(-width // LANES) * LANES
