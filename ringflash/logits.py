"""What the loss needs of the logits on one device: ln Z, the target's logit, the gradients; in chunks.

Tokens and columns of the vocabulary are both cut into chunks, and only one chunk of logits exists at a time.
The unembedding lies over devices by its width D and by its vocabulary V. For a chunk of columns its parts are
gathered over D, in the dtype of x, all tokens meet it, and the sum of its gradient is scattered again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ringflash.shards import Names, add, add_and_scatter, gather, greatest, names_of, place

Array = jax.Array


@dataclass(frozen=True)
class Cut:
    """How the work is cut up: over devices, and on a device into chunks.

    axes: the mesh axes of batch and time.  split: those of the unembedding's D and V; what is None is whole,
    and a whole vocabulary is worked on by each device.  chunk tokens times vocab_chunk columns: the most
    logits that exist at one time. They are computed once where vocab_chunk holds all columns of a device,
    else once for ln Z and once more for the gradients.
    """

    mesh: Mesh
    axes: P
    split: P
    chunk: int
    vocab_chunk: int

    @property
    def tokens(self) -> Names:
        """The axes over which tokens lie."""
        return tuple(name for part in self.axes for name in names_of(part, self.mesh))

    @property
    def width(self) -> Names:
        """The axes over which D lies."""
        return names_of(self.split[0], self.mesh)

    @property
    def vocabulary(self) -> Names:
        """The axes over which V lies."""
        return names_of(self.split[1], self.mesh)


class Running(NamedTuple):
    """Of each token, over the columns so far, in fp32.

    The greatest logit, the sum of exp(logit - greatest), and the target's logit.
    """

    top: Array
    mass: Array
    hit: Array


def nothing(shape: tuple[int, ...]) -> Running:
    """Of no columns."""
    zeros = jnp.zeros(shape, jnp.float32)
    return Running(jnp.full(shape, -jnp.inf, jnp.float32), zeros, zeros)


def fold(so_far: Running, logits_CV: Array, hot_CV: Array) -> Running:
    """These columns too (arXiv:1805.02867); hot_CV: where the target is."""
    top = jnp.maximum(so_far.top, logits_CV.max(-1))
    mass = so_far.mass * jnp.exp(so_far.top - top) + jnp.exp(logits_CV - top[:, None]).sum(-1)
    return Running(top, mass, so_far.hit + jnp.where(hot_CV, logits_CV, 0.0).sum(-1))


def finish(found: Running, names: Names) -> tuple[Array, Array]:
    """ln Z and the target's logit, over the columns of all devices along these axes."""
    top = greatest(found.top, names)
    mass, hit = add((found.mass * jnp.exp(found.top - top), found.hit), names)
    return top + jnp.log(mass), hit


def statistics(x_BTD: Array, w_DV: Array, targets_BT: Array, cut: Cut) -> tuple[Array, Array]:
    """On one device: ln Z and the target's logit, fp32 [B, T]; 0 for a target that no device has."""
    targets = chunks(own_targets(targets_BT, w_DV, cut), cut.chunk)
    found = _statistics(
        chunks(x_BTD, cut.chunk), columns(w_DV, cut, x_BTD.dtype), targets, w_DV, cut
    )
    lse, hit = (whole(a, targets_BT.shape) for a in found)
    return lse, hit


def _statistics(x_KCD: Array, parts: Any, targets_KC: Array, w_DV: Array, cut: Cut) -> Any:
    def over_columns(so_far: Running, part: tuple[Array, Array]) -> tuple[Running, None]:
        w, first = gather(part[0], cut.width), part[1]

        def over_tokens(chunk: tuple[Array, Array, Running]) -> Running:
            x, targets, so_far = chunk
            return fold(so_far, *scores(x, w, targets, first, w_DV.shape[1]))

        return lax.map(over_tokens, (x_KCD, targets_KC, so_far)), None

    found, _ = lax.scan(over_columns, nothing(targets_KC.shape), parts)
    return finish(found, cut.vocabulary)


def gradients(
    x_BTD: Array, w_DV: Array, targets_BT: Array, counts_BT: Array, cut: Cut, z_loss: float
) -> tuple[Array, Array, Array, Array]:
    """On one device: ln Z, the target's logit, dx in x's dtype, and the device's part of dW in fp32.

    Of the sum, over tokens that count, of ln Z - target's logit + z_loss * (ln Z)^2.
    """
    D, own = w_DV.shape
    x = chunks(x_BTD, cut.chunk)
    targets, counts = (
        chunks(a, cut.chunk) for a in (own_targets(targets_BT, w_DV, cut), counts_BT)
    )
    parts = columns(w_DV, cut, x.dtype)
    once = len(parts[0]) == 1

    def over_columns(carry: tuple[Array, Any], part: tuple[Array, Array]) -> Any:
        w, first = gather(part[0], cut.width), part[1]

        def over_tokens(dw: Array, chunk: Any) -> tuple[Array, Any]:
            x, targets, counts, dx, found = chunk
            logits, hot = scores(x, w, targets, first, own)
            if once:
                found = finish(fold(nothing(targets.shape), logits, hot), cut.vocabulary)
            lse = found[0][:, None]
            slope = jnp.exp(logits - lse) * (1 + 2 * z_loss * lse) - hot
            slope = jnp.where(counts[:, None], slope, 0.0).astype(x.dtype)
            dw = dw + product("cd,cv->dv", x, slope)
            return dw, (dx + product("cv,dv->cd", slope, w), found)

        dw, carry = lax.scan(
            over_tokens, jnp.zeros(w.shape, jnp.float32), (x, targets, counts, *carry)
        )
        return carry, add(add_and_scatter(dw, cut.width), others)

    others = tuple(name for name in cut.tokens if name not in cut.width)
    unknown = nothing(targets.shape)[1:]
    known = unknown if once else _statistics(x, parts, targets, w_DV, cut)
    start = jnp.zeros(x.shape, jnp.float32), known
    (dx, found), dw_JDC = lax.scan(over_columns, start, parts)
    lse, hit = (whole(a, targets_BT.shape) for a in found)
    dx = whole(add(dx, cut.vocabulary).astype(x.dtype), x_BTD.shape)
    return lse, hit, dx, dw_JDC.swapaxes(0, 1).reshape(D, -1)[:, :own]


def product(dims: str, a: Array, b: Array) -> Array:
    """An einsum whose sums, and result, are fp32."""
    return jnp.einsum(dims, a, b, preferred_element_type=jnp.float32)


def scores(
    x_CD: Array, w_DV: Array, targets_C: Array, first: Array, own: int
) -> tuple[Array, Array]:
    """Logits [C, V], fp32, of the columns from `first` on, -inf from `own` on; and where the target is."""
    column_V = first + jnp.arange(w_DV.shape[1])
    logits = jnp.where(column_V < own, product("cd,dv->cv", x_CD, w_DV), -jnp.inf)
    return logits, column_V == targets_C[:, None]


def own_targets(targets_BT: Array, w_DV: Array, cut: Cut) -> Array:
    """Which of the device's own columns the target is; -1 for none of them."""
    here = targets_BT - place(cut.vocabulary) * w_DV.shape[1]
    return jnp.where((here >= 0) & (here < w_DV.shape[1]), here, -1)


def columns(w_DV: Array, cut: Cut, dtype: Any) -> tuple[Array, Array]:
    """A device's columns as [chunks, D, size], filled up with zeros, and each chunk's first column."""
    D, own = w_DV.shape
    count = -(-own // cut.vocab_chunk)
    size = -(-own // count)
    w = jnp.pad(w_DV.astype(dtype), ((0, 0), (0, count * size - own)))
    return w.reshape(D, count, size).swapaxes(0, 1), size * jnp.arange(count)


def chunks(x: Array, chunk: int) -> Array:
    """[B, T, ...] -> [chunks, chunk, ...], filled up with zeros (which no mask counts)."""
    x = x.reshape(-1, *x.shape[2:])
    chunk = min(chunk, x.shape[0])
    x = jnp.pad(x, [(0, -x.shape[0] % chunk)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, chunk, *x.shape[1:])


def whole(x: Array, shape: tuple[int, ...]) -> Array:
    """[chunks, chunk, ...] -> [B, T, ...]: what `chunks` filled up is left out."""
    B, T = shape[:2]
    return x.reshape(-1, *x.shape[2:])[: B * T].reshape(shape)
