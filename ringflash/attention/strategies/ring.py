"""Ring attention (arXiv:2310.01889) as a function from kernel to kernel.

Two parcels, each half of a shard's K and V (`shares.py`), go round the ring, one up and one down, so that
both directions of every link carry all the time; or all of it goes only as far as some query sees
(`routes.py`). While a block is worked on, the next is on its way: start and end of a transfer stand around
a kernel.

How they go, and what is computed meanwhile, is `trip`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from ringflash.attention.axis import Axis, alike, size_of
from ringflash.attention.kernel import (
    Grads,
    Kernel,
    Partial,
    add_grads,
    empty_partial,
    sum_dtype,
)
from ringflash.attention.mask import Tokens
from ringflash.attention.strategies.routes import Route, routed
from ringflash.attention.strategies.trip import Trip

Array = jax.Array


def ring(kernel: Kernel, axis: Axis) -> Kernel:
    """`kernel` over a sequence sharded on mesh axis `axis`."""

    def forward(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, carry: Partial | None = None
    ) -> Partial:
        if size_of(axis) == 1:
            return kernel.forward(q, k, v, q_at, k_at, carry)

        def along(routes: Sequence[Route]) -> Partial:
            part = empty_partial(q, v.shape[3]) if carry is None else carry
            part = alike(part, q, k, v, q_at, k_at)
            for route in routes:
                trip = Trip.of(kernel, axis, route, q, k, v, q_at)
                part = route.if_any(partial(trip.forward, k, v, k_at), part)
            return part

        return routed(kernel, axis, q_at, k_at, along)

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
        if size_of(axis) == 1:
            return kernel.backward(q, k, v, q_at, k_at, dout, lse_BNT, delta_BNT, into)
        rows = (dout, lse_BNT, delta_BNT)

        def along(routes: Sequence[Route]) -> Grads:
            grads = Grads(jnp.zeros(q.shape, sum_dtype(q)), None, None)
            grads = alike(grads, q, k, v, q_at, k_at, *rows)
            for route in routes:
                trip = Trip.of(kernel, axis, route, q, k, v, q_at)
                grads = route.if_any(partial(trip.backward, k, v, k_at, rows), grads)
            return grads

        return add_grads(into, routed(kernel, axis, q_at, k_at, along))

    name, axes = f"ring({kernel.name})", (axis, *kernel.axes)
    return Kernel(name, kernel.spec, forward, backward, axes, kernel.unsupported)
