"""Next-token cross-entropy of global arrays, in chunks of tokens and of the vocabulary: see `logits`.

No [T, V] array ever exists, and the unembedding and its gradient are never whole on a device. The
denominator is the caller's: it is counted on the global batch, and the sum here knows nothing of shards.

A target that is negative (-1 or -100, say) counts for nothing, whatever the mask says; one beyond the
vocabulary makes the loss NaN.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ringflash.logits import Cut, gradients, statistics
from ringflash.shards import add, mapped

Array = jax.Array


def counted(targets_BT: Array, mask_BT: Array) -> Array:
    """Which targets count: those of the mask that are not negative."""
    return mask_BT & (targets_BT >= 0)


def token_losses(x_BTD: Array, unembedding_DV: Array, targets_BT: Array, *, cut: Cut) -> Array:
    """-ln p(target) in nats, fp32 [B, T]; 0 where the target is negative."""
    found = everywhere(x_BTD, unembedding_DV, targets_BT, cut)
    return nats(*found, targets_BT, unembedding_DV.shape[1])


def summed_loss(
    x_BTD: Array,
    unembedding_DV: Array,
    targets_BT: Array,
    mask_BT: Array,
    *,
    cut: Cut,
    z_loss: float = 0.0,
) -> tuple[Array, Array]:
    """What to minimise, and the sum of -ln p(target) in nats, over the targets that count; fp32.

    The first is the second plus z_loss * (ln Z)^2 of each target, Z the sum of exp(logits) (PaLM,
    arXiv:2204.02311). It alone has gradients, of x and W: they are made together with the value, and nothing
    else is kept for the backward pass.
    """
    V, counts_BT, wide = unembedding_DV.shape[1], counted(targets_BT, mask_BT), P(*cut.axes, None)

    def sums(lse: Array, hit: Array, targets: Array, counts: Array) -> tuple[Array, Array]:
        cross_entropy = jnp.where(counts, nats(lse, hit, targets, V), 0.0).sum()
        return cross_entropy + z_loss * jnp.where(counts, lse * lse, 0.0).sum(), cross_entropy

    @jax.custom_vjp
    def total(x: Array, w: Array) -> tuple[Array, Array]:
        return sums(*everywhere(x, w, targets_BT, cut), targets_BT, counts_BT)

    def local(x: Array, w: Array, targets: Array, counts: Array) -> Any:
        lse, hit, dx, dw = gradients(x, w, targets, counts, cut, z_loss)
        return add(sums(lse, hit, targets, counts), cut.tokens), dx, dw

    def forward(x: Array, w: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        specs = (wide, cut.split, cut.axes, cut.axes)
        run = mapped(local, cut.mesh, specs, (P(), wide, cut.split))
        value, dx, dw = run(x, w, targets_BT, counts_BT)
        return value, (dx, dw)

    def backward(saved: tuple[Array, Array], scales: tuple[Array, Array]) -> tuple[Array, Array]:
        dx, dw = (grad * scales[0] for grad in saved)
        return dx.astype(x_BTD.dtype), dw.astype(unembedding_DV.dtype)

    total.defvjp(forward, backward)
    objective, cross_entropy = total(x_BTD, unembedding_DV)
    return objective, lax.stop_gradient(cross_entropy)


def everywhere(x_BTD: Array, w_DV: Array, targets_BT: Array, cut: Cut) -> tuple[Array, Array]:
    """`statistics` of global arrays."""
    specs = (P(*cut.axes, None), cut.split, cut.axes)
    run = mapped(partial(statistics, cut=cut), cut.mesh, specs, (cut.axes, cut.axes))
    return run(x_BTD, w_DV, targets_BT)


def nats(lse: Array, hit: Array, targets: Array, V: int) -> Array:
    """-ln p(target)."""
    return jnp.where(targets < 0, 0.0, jnp.where(targets < V, lse - hit, jnp.nan))
