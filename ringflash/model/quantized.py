"""Products in 8 bits, forward and backward, on the arrays of qwix: numbers of 8 bits and their scales.

What is quantised, each time anew from the largest absolute value, in fp32 (qwix's rules for training):

    y  = x @ w        x: one scale a token; w: one scale a column
    dx = dy @ w.T     dy times w's scales, which lie along what is summed: one scale a token; w as it was
    dw = x.T @ dy     dy times x's scales: one scale a column and tile of tokens; x as it was

Gradients pass the rounding straight through. Sums are int32 or fp32, and become fp32 by the scales. No token
shares a scale with another before dw, so none sees the future or another document.

A tile is what one device has of the tokens, as with AQT's local quantisation: no scale waits for other
devices, gradients are added up between them in fp32, and no sum of int32 is too long for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import qwix

Array = jax.Array
Bits = tuple[Array, Array]  # of 8-bit numbers, and their scales
# E4M3 for gradients too, as where scales are fine its range is enough (DeepSeek-V3, arXiv:2412.19437).
DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
LONGEST = 2**16  # tokens of a tile: 2**17 times 128 * 128 would be too much for int32


@functools.cache
def quantized(name: str, rows: int, shards: int) -> Callable[[Array, Array, int], Array]:
    """The product in the 8 bits of this name; rows, shards: how devices share the first two dims of x."""

    def product(x: Array, w: Array, axes: int) -> Array:
        lead, out = x.shape[:-axes], w.shape[axes:]
        D = math.prod(w.shape[:axes])
        x_BTD = x.reshape(lead[0], math.prod(lead[1:]), D)
        y_BTF = multiply(x_BTD, w.reshape(D, -1).astype(jnp.float32), DTYPES[name], rows, shards)
        return y_BTF.reshape(*lead, *out)

    return product


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def multiply(x_BTD: Array, w_DF: Array, dtype: jnp.dtype, rows: int, shards: int) -> Array:
    """x @ w in x's dtype; w in fp32."""
    return forward(x_BTD, w_DF, dtype, rows, shards)[0]


def forward(
    x_BTD: Array, w_DF: Array, dtype: jnp.dtype, rows: int, shards: int
) -> tuple[Array, tuple[Bits, Bits]]:
    """The product, and what the backward needs: 8 bits a number and the scales."""
    x = qwix.quantize(x_BTD.astype(jnp.float32), dtype, channelwise_axes=(0, 1))
    w = qwix.quantize(w_DF, dtype, channelwise_axes=(1,))
    y_BTF = dot("btd,df->btf", x, w)
    return y_BTF.astype(x_BTD.dtype), (as_bits(x), as_bits(w))


def backward(
    dtype: jnp.dtype,
    rows: int,
    shards: int,
    kept: tuple[Bits, Bits],
    dy_BTF: Array,
) -> tuple[Array, Array]:
    """dx in the dtype of dy, which is x's; dw in fp32."""
    x, w = (as_numbers(bits, dtype) for bits in kept)
    wide_BTF = dy_BTF.astype(jnp.float32)
    dy = qwix.quantize(wide_BTF * w.scale, dtype, channelwise_axes=(0, 1))
    dx_BTD = dot("btf,df->btd", dy, w.qvalue)
    # The dims of `tiles`: a scale for each of the first and third, and of the last.
    dy = qwix.quantize(tiles(wide_BTF * x.scale, rows, shards), dtype, channelwise_axes=(0, 2, 4))
    parts = dot("rbntd,rbntf->rndf", tiles(x.qvalue, rows, shards), dy)
    return dx_BTD.astype(dy_BTF.dtype), parts.sum((0, 1))


multiply.defvjp(forward, backward)


def as_bits(x: qwix.QArray) -> Bits:
    """What `jax.checkpoint` may keep: floats go through `reduce_precision` there, which takes E4M3 for
    an IEEE type that ends at 240; ours has no infinity and ends at 448, and would come back as NaN."""
    return jax.lax.bitcast_convert_type(x.qvalue, jnp.uint8), x.scale


def as_numbers(bits: Bits, dtype: jnp.dtype) -> qwix.QArray:
    """The inverse of `as_bits`."""
    return qwix.QArray(jax.lax.bitcast_convert_type(bits[0], dtype), bits[1])


def dot(dims: str, x: qwix.QArray | Array, y: qwix.QArray | Array) -> Array:
    """The sums of products of 8 bits, times the scales, in fp32."""
    return qwix.einsum(dims, x, y, preferred_element_type=jnp.float32)


def tiles(x_BTD: Array, rows: int, shards: int) -> Array:
    """[rows, B / rows, parts, T / parts, D], with the fewest parts of each shard that are short enough."""
    B, T, D = x_BTD.shape
    fits = (
        n for n in range(shards, T + 1, shards) if T % n == 0 and B // rows * (T // n) <= LONGEST
    )
    parts = next(fits)
    return x_BTD.reshape(rows, B // rows, parts, T // parts, D)
