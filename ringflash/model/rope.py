"""Rotary position embedding (arXiv:2104.09864), in the rotate-half order of Hugging Face's Llama."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def angles(positions_BT: Array, *, head_dim: int, theta: float) -> Array:
    """[B, T, head_dim / 2] in fp32: position * theta^(-2i / head_dim)."""
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return positions_BT[..., None].astype(jnp.float32) * theta**-exponent


def rotate(x_BTNH: Array, angles_BTH: Array) -> Array:
    """Turn each pair (i, i + head_dim / 2) by its angle, in fp32; the result has x's dtype."""
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles_BTH)[:, :, None], jnp.sin(angles_BTH)[:, :, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)
