"""The definition: dense attention in fp32 (fp64 where the inputs are), a screenful, never fast."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ringflash.attention.kernel import (
    FLOOR,
    Grads,
    Kernel,
    Partial,
    add_grads,
    merge,
    sum_dtype,
)
from ringflash.attention.mask import Tokens
from ringflash.attention.spec import Spec
from ringflash.attention.tile import biased, cap_slope, capped, dropped

Array = jax.Array


def reference(spec: Spec) -> Kernel:
    """Dense attention: every score of [B, K, G, T, S] at once."""

    def products(q: Array, k: Array, q_at: Tokens, k_at: Tokens) -> tuple[Array, Array]:
        q_BTKGH, k_BSKH = grouped(wide(q), k.shape[2]), wide(k)
        raw = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH) * spec.scale_for(q.shape[3])
        return capped(raw, spec), spec.visible(q_at, k_at)[:, None, None]

    def forward(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, carry: Partial | None = None
    ) -> Partial:
        cap, visible = products(q, k, q_at, k_at)
        score = jnp.where(visible, biased(cap, spec, q_at, k_at), FLOOR)
        lse = jax.nn.logsumexp(score, axis=-1, where=visible, keepdims=True)
        lse = jnp.maximum(lse, FLOOR)
        p = jnp.where(visible, jnp.exp(score - lse), 0.0)
        p = dropped(p, spec, q_at, k_at)
        out = flat(jnp.einsum("bkgts,bskh->btkgh", p, wide(v)))
        partial = Partial(out, lse.reshape(q.shape[0], q.shape[2], q.shape[1]))
        return partial if carry is None else merge(carry, partial)

    def backward(
        q: Array,
        k: Array,
        v: Array,
        q_at: Tokens,
        k_at: Tokens,
        dout: Array,
        lse_BNT: Array,
        delta_BNT: Array,
        into: Grads | None = None,
    ) -> Grads:
        cap, visible = products(q, k, q_at, k_at)
        rows = (*cap.shape[:4], 1)
        score = biased(cap, spec, q_at, k_at)
        p = jnp.where(visible, jnp.exp(score - lse_BNT.reshape(rows)), 0.0)
        dout_BTKGH = grouped(wide(dout), k.shape[2])
        dp = dropped(jnp.einsum("btkgh,bskh->bkgts", dout_BTKGH, wide(v)), spec, q_at, k_at)
        ds = p * (dp - delta_BNT.reshape(rows)) * cap_slope(cap, spec) * spec.scale_for(q.shape[3])
        grads = Grads(
            flat(jnp.einsum("bkgts,bskh->btkgh", ds, wide(k))),
            jnp.einsum("bkgts,btkgh->bskh", ds, grouped(wide(q), k.shape[2])),
            jnp.einsum("bkgts,btkgh->bskh", dropped(p, spec, q_at, k_at), dout_BTKGH),
        )
        return add_grads(into, grads)

    return Kernel("reference", spec, forward, backward)


def wide(x: Array) -> Array:
    """In fp32, or fp64 if that is what came."""
    return x.astype(sum_dtype(x))


def grouped(x_BTNH: Array, kv_heads: int) -> Array:
    """[B, T, N, H] -> [B, T, K, G, H]: query head n belongs to key/value head n // G."""
    B, T, N, H = x_BTNH.shape
    return x_BTNH.reshape(B, T, kv_heads, N // kv_heads, H)


def flat(x_BTKGH: Array) -> Array:
    """[B, T, K, G, H] -> [B, T, N, H]."""
    B, T, K, G, H = x_BTKGH.shape
    return x_BTKGH.reshape(B, T, K * G, H)
