"""Ulysses (arXiv:2309.14509): sequence sharded outside, heads sharded inside, by all-to-all.

K/V heads fewer than the axis has devices are sent to each device that needs them, never more often, and
dk and dv are summed over those copies in fp32. `ulysses(ring(kernel, outer), inner)` is the hybrid (USP).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ringflash.attention.axis import Axis, exchanged, gathered, size_of
from ringflash.attention.kernel import Grads, Kernel, Partial, add_grads
from ringflash.attention.mask import Tokens

Array = jax.Array


def ulysses(kernel: Kernel, axis: Axis) -> Kernel:
    """`kernel` on all the time of mesh axis `axis`, for a share of the heads.

    Raises ValueError, when traced, where the heads cannot be shared out.
    """

    def inward(x: Array, heads: int = 2, time: int = 1) -> Array:
        return exchanged(x, axis, split=heads, join=time)

    def outward(x: Array, heads: int = 2, time: int = 1) -> Array:
        return exchanged(x, axis, split=time, join=heads)

    def all_time(at: Tokens) -> Tokens:
        positions, segments = (gathered(x, axis, dim=1, tiled=True) for x in at[:2])
        heads = at.heads_N
        if heads is not None:
            heads = exchanged(heads[None], axis, split=1, join=0)[0]
        return Tokens(positions, segments, heads, at.seeds_B)

    def keys(x_BSKH: Array, copies: int) -> Array:
        return inward(jnp.repeat(x_BSKH, copies, axis=2))

    def keys_back(d_BSKH: Array, copies: int) -> Array:
        d = outward(d_BSKH)
        return d.reshape(*d.shape[:2], -1, copies, d.shape[3]).sum(3)

    def forward(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, carry: Partial | None = None
    ) -> Partial:
        copies = key_copies(q.shape[2], k.shape[2], size_of(axis))
        if carry is not None:
            carry = Partial(inward(carry.out_BTNH), inward(carry.lse_BNT, 1, 2))
        out, lse = kernel.forward(
            inward(q), keys(k, copies), keys(v, copies), all_time(q_at), all_time(k_at), carry
        )
        return Partial(outward(out), outward(lse, 1, 2))

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
        copies = key_copies(q.shape[2], k.shape[2], size_of(axis))
        dq, dk, dv = kernel.backward(
            inward(q),
            keys(k, copies),
            keys(v, copies),
            all_time(q_at),
            all_time(k_at),
            inward(dout),
            inward(lse_BNT, 1, 2),
            inward(delta_BNT, 1, 2),
        )
        return add_grads(into, Grads(outward(dq), keys_back(dk, copies), keys_back(dv, copies)))

    name, axes = f"ulysses({kernel.name})", (axis, *kernel.axes)
    return Kernel(name, kernel.spec, forward, backward, axes, kernel.unsupported)


def key_copies(N: int, K: int, size: int) -> int:
    """How many devices need each K/V head. Raises ValueError where the heads cannot be shared out."""
    copies = math.lcm(K, size) // K
    if N % (K * copies):
        raise ValueError(
            f"ulysses over {size} devices needs query heads in a multiple of {K * copies} "
            f"(key/value heads {K}), found {N}"
        )
    return copies
