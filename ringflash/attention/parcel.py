"""What travels round a ring: K, V and their Tokens as one array, so that a hop is one transfer.

The parcel is unsigned integers: a move never rounds, and never flushes the small integers of the tokens,
which as floats would be denormal. Tokens lie behind the keys on the time axis, where a cut costs nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ringflash.attention.mask import Tokens

Array = jax.Array


def pack(k_BSKH: Array, v_BSKH: Array, at: Tokens) -> Array:
    """[B, S + rows for the tokens, K, k width + v width], unsigned integers of the width of k's dtype."""
    bits = unsigned(k_BSKH)
    body = lax.bitcast_convert_type(jnp.concatenate([k_BSKH, v_BSKH], axis=-1), bits)
    B, _, K, W = body.shape
    tail = lax.bitcast_convert_type(jnp.stack(at[:2], axis=-1), bits).reshape(B, -1)
    tail = jnp.pad(tail, ((0, 0), (0, -tail.shape[1] % (K * W))))
    return jnp.concatenate([body, tail.reshape(B, -1, K, W)], axis=1)


def unpack(parcel: Array, k_BSKH: Array, v_BSKH: Array) -> tuple[Array, Array, Tokens]:
    """The K, V and Tokens of a parcel; `k_BSKH` and `v_BSKH` only tell time, widths and dtype."""
    S, width = k_BSKH.shape[1], k_BSKH.shape[3]
    body = lax.bitcast_convert_type(parcel[:, :S], k_BSKH.dtype)
    words = S * 2 * 4 // k_BSKH.dtype.itemsize
    tail = parcel[:, S:].reshape(parcel.shape[0], -1)[:, :words]
    shape = (parcel.shape[0], S, 2, max(1, 4 // k_BSKH.dtype.itemsize))
    if k_BSKH.dtype.itemsize == 8:  # both int32 of a token in one word
        tokens = lax.bitcast_convert_type(tail, jnp.int32)
    else:
        tail = tail.reshape(shape) if shape[-1] > 1 else tail.reshape(shape[:-1])
        tokens = lax.bitcast_convert_type(tail, jnp.int32)
    return body[..., :width], body[..., width:], Tokens(tokens[..., 0], tokens[..., 1])


def unsigned(x: Array) -> jnp.dtype:
    """The unsigned integer dtype as wide as x's."""
    return jnp.dtype(f"uint{8 * x.dtype.itemsize}")
