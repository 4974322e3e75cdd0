"""Next-token cross-entropy in chunks of tokens, so that no [T, V] array ever exists.

The sum and its gradients are made in one pass: the logits of a chunk are computed once. The denominator is
the caller's: it is counted on the global batch, and the sum here knows nothing of shards.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

Array = jax.Array


def token_losses(
    x_BTD: Array, unembedding_DV: Array, targets_BT: Array, *, chunk: int, mesh: Mesh, axes: P
) -> Array:
    """-ln p(target) in nats, fp32 [B, T]; batch and time lie on the mesh axes `axes`."""

    def local(x: Array, w: Array, targets: Array) -> Array:
        xs, ts = chunks(x, chunk), chunks(targets, chunk)
        losses = lax.map(lambda c: nats(c[0], w, c[1])[0], (xs, ts))
        return losses.reshape(-1)[: targets.size].reshape(targets.shape)

    specs = (P(*axes, None), P(), axes)
    return mapped(local, mesh, specs, axes)(x_BTD, unembedding_DV, targets_BT)


def summed_loss(
    x_BTD: Array,
    unembedding_DV: Array,
    targets_BT: Array,
    mask_BT: Array,
    *,
    chunk: int,
    mesh: Mesh,
    axes: P,
) -> Array:
    """Sum of -ln p(target) over the targets that count, in fp32, with gradients of x and W."""

    @jax.custom_vjp
    def total(x: Array, w: Array) -> Array:
        losses = token_losses(x, w, targets_BT, chunk=chunk, mesh=mesh, axes=axes)
        return jnp.where(mask_BT, losses, 0.0).sum()

    def forward(x: Array, w: Array) -> tuple[Array, Any]:
        wide = P(*axes, None)
        run = mapped(local, mesh, (wide, P(), axes, axes), (P(), wide, P()))
        value, dx, dw = run(x, w, targets_BT, mask_BT)
        return value, (dx, dw)

    def local(x: Array, w: Array, targets: Array, mask: Array) -> tuple[Array, Array, Array]:
        def step(carry: tuple[Array, Array], c: tuple[Array, ...]) -> Any:
            losses, p_CV = nats(c[0], w, c[1])
            hit = jax.nn.one_hot(c[1], w.shape[1], dtype=jnp.float32)
            slope = jnp.where(c[2][:, None], p_CV - hit, 0.0).astype(x.dtype)
            dw = carry[1] + jnp.einsum("cd,cv->dv", c[0], slope, preferred_element_type=jnp.float32)
            dx = jnp.einsum("cv,dv->cd", slope, w.astype(x.dtype))
            return (carry[0] + jnp.where(c[2], losses, 0.0).sum(), dw), dx

        start = (jnp.zeros((), jnp.float32), jnp.zeros(w.shape, jnp.float32))
        xs = tuple(chunks(array, chunk) for array in (x, targets, mask))
        (value, dw), dx = lax.scan(step, start, xs)
        over = tuple(a for part in axes for a in ((part,) if isinstance(part, str) else part))
        dx = dx.reshape(-1, x.shape[-1])[: targets.size].reshape(x.shape)
        return lax.psum(value, over), dx, lax.psum(dw, over)

    def backward(saved: tuple[Array, Array], scale: Array) -> tuple[Array, Array]:
        dx, dw = saved
        return (dx * scale).astype(x_BTD.dtype), (dw * scale).astype(unembedding_DV.dtype)

    total.defvjp(forward, backward)
    return total(x_BTD, unembedding_DV)


def nats(x_CD: Array, w_DV: Array, targets_C: Array) -> tuple[Array, Array]:
    """-ln p(target) [C] and p [C, V], both fp32."""
    logits = jnp.einsum(
        "cd,dv->cv", x_CD, w_DV.astype(x_CD.dtype), preferred_element_type=jnp.float32
    )
    lse = jax.nn.logsumexp(logits, axis=-1)
    hit = jnp.take_along_axis(logits, targets_C[:, None], axis=-1)[:, 0]
    return lse - hit, jnp.exp(logits - lse[:, None])


def chunks(x: Array, chunk: int) -> Array:
    """[B, T, ...] -> [chunks, chunk, ...], filled up with zeros (which no mask counts)."""
    x = x.reshape(-1, *x.shape[2:])
    chunk = min(chunk, x.shape[0])
    x = jnp.pad(x, [(0, -x.shape[0] % chunk)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, chunk, *x.shape[1:])


def mapped(f: Any, mesh: Mesh, in_specs: Any, out_specs: Any) -> Any:
    """`f` on what each device holds; replicated results are psums, so that is not proved again."""
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
