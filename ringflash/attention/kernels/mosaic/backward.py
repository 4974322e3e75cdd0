"""The backward kernel: five products a unit in one pass, in a software pipeline of three stages.

The step holds tiles of keys and their dk, dv; tiles of queries stream past with dout, lse, delta and dq,
which is read, added to and written back once a step. `expand` makes S and dP of a unit, `weigh` turns those
of the unit before into P and dS, `gather` adds the products of the one before that.

Two layouts of a score tile, as is quicker on a generation: keys down (statistics are rows) or queries down.
`backward_call.py` runs it. FlashAttention-2 (arXiv:2307.08691, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringflash.attention.kernels.mosaic.agenda import unpacked
from ringflash.attention.kernels.mosaic.pipeline import F32, SLOTS, chunks, columns, dot
from ringflash.attention.tile import hidden, in_base_2, score_gradient, seen

Array = jax.Array
ROWS = 8  # that go with queries: lse, delta (bits of fp32), lo, hi, segment; a register has eight


class Refs(NamedTuple):
    """What a step holds: its block of keys, and scratch."""

    k: Any  # [held, block_k, H]
    v: Any  # [held, block_k, V]
    marks: Any  # [held, 2, block_k] int32: position and segment
    dk: Any  # [held * block_k, H] or [H, held * block_k] fp32
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
    """A unit on its way."""

    at: Array  # its place in the agenda
    word: Array  # what the agenda says there
    head: Array
    fetched: Array  # tiles of queries up to this one

    @property
    def held(self) -> Array:
        """The tile of keys."""
        return unpacked(self.word).resident

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
        of_query = columns(rows, 5)
        return lambda at: (*of_query, *(marks[n : n + 1, at] for n in range(2)))
    of_key = columns(marks, 2) if tests else [None, None]
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
    block_k = refs.s.shape[key_dim]
    keys = pl.ds(pl.multiple_of(unit.held * block_k, block_k), block_k)
    if form.turned:
        refs.dv[:, keys] += dot(dout.T, p, 1, 1 - key_dim)
        refs.dk[:, keys] += dot(q.T, ds, 1, 1 - key_dim)
    else:
        refs.dv[keys] += dot(p, dout, 1 - key_dim, 0)
        refs.dk[keys] += dot(ds, q, 1 - key_dim, 0)
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
    runs = chunks(refs.s.shape[1], form.chunk)
    if now is not None:
        line = lines(refs, now, form, tests)
        for at in runs:
            weigh(refs, line(at), form, tests, at)
    if new is not None:
        for at in runs:
            expand(refs, new, form, at)
