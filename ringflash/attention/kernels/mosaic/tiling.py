"""Arrays of the contract cut in tiles, heads before time, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ringflash.attention.kernel import FLOOR
from ringflash.attention.kernels.mosaic.agenda import SUB_BITS, key_rows, query_rows
from ringflash.attention.kernels.mosaic.backward import ROWS
from ringflash.attention.mask import Tokens, lengthened
from ringflash.attention.spec import Spec
from ringflash.attention.tile import LOG2E, query_factor

Array = jax.Array


def held_of(tiles: int, most: int) -> int:
    """How many of `tiles` a step holds: more than half of `most`, so that the last step lacks the fewest."""
    most = max(1, min(most, tiles, 1 << SUB_BITS))
    return min(range(most, most // 2, -1), key=lambda held: -tiles % held)


def whole(at: Tokens, unit: int) -> Tokens:
    """The tokens, made a multiple of `unit` by padding."""
    return lengthened(Tokens(*at[:2]), -at.positions_BT.shape[1] % unit)


def scaled(q: Array, spec: Spec, dtype: Any) -> Array:
    """q times what the kernels expect to be in it."""
    return (q.astype(jnp.float32) * query_factor(spec, q.shape[3])).astype(dtype)


def heads_first(x_BTNH: Array, block: int, count: int) -> Array:
    """[B, T, heads, width] -> [B, heads, count, block, width], padded with zeros."""
    B, _, heads, width = x_BTNH.shape
    x = lengthened_to(x_BTNH, block * count)
    return x.swapaxes(1, 2).reshape(B, heads, count, block, width)


def lengthened_to(x_BTNH: Array, length: int) -> Array:
    """Padded with zeros at the end of time."""
    return jnp.pad(x_BTNH, ((0, 0), (0, length - x_BTNH.shape[1]), (0, 0), (0, 0)))


def time_first(x: Array, length: int) -> Array:
    """The inverse of `heads_first`, cut to `length`."""
    B, heads, _, _, width = x.shape
    return x.reshape(B, heads, -1, width)[:, :, :length].swapaxes(1, 2)


def rows_first(x_BNT: Array, block: int, count: int) -> Array:
    """[B, N, T] -> [B, N, count, block], padded with zeros."""
    B, N, T = x_BNT.shape
    x = jnp.pad(x_BNT, ((0, 0), (0, 0), (0, block * count - T)))
    return x.reshape(B, N, count, block)


def tested(spec: Spec, q_at: Tokens, count: int) -> Array:
    """[B, count, 3, block] int32: what queries' tests compare (lo, hi, segment)."""
    return jnp.stack([x.reshape(x.shape[0], count, -1) for x in query_rows(spec, q_at)], 2)


def marked(k_at: Tokens, count: int) -> Array:
    """[B, count, 2, block] int32: what keys' tests compare (position, segment)."""
    return jnp.stack([x.reshape(x.shape[0], count, -1) for x in key_rows(k_at)], 2)


def beside_queries(lse_BNT: Array, delta_BNT: Array, tested_rows: Array) -> Array:
    """[B, N, tiles, ROWS, block] int32: what the backward needs to know of each query.

    The lse of padding is above every score, so that its weights are 0. In the forward, whose tiles may be
    others, it may have met no key, and the weights of a row that saw nothing are infinite where it sees one.
    """
    B, count, _, block = tested_rows.shape

    def bits(x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.int32)[:, :, :, None]

    lse, delta = (rows_first(x.astype(jnp.float32), block, count) for x in (lse_BNT, delta_BNT))
    padding = tested_rows[:, None, :, 2] < 0
    numbers = [bits(jnp.where(padding, -FLOOR, lse * LOG2E)), bits(delta)]
    shape = (B, lse_BNT.shape[1], *tested_rows.shape[1:])
    rows = jnp.concatenate([*numbers, jnp.broadcast_to(tested_rows[:, None], shape)], 3)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, ROWS - rows.shape[3]), (0, 0)))
