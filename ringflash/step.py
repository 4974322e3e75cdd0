"""One update, jitted by whoever assembles it. The loss is a global sum over a global count."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

Array = jax.Array


class State(NamedTuple):
    """What a run is: parameters, optimizer state, and the number of updates made."""

    params: Any
    opt_state: Any
    step: Array


class LossSum(NamedTuple):
    """Sum of losses in nats, fp32, and the number of targets that count, int32; both global.

    objective: what is minimised, where that is not the sum alone: it has the z-loss too.
    """

    total: Array
    targets: Array
    objective: Array | None = None


def init_state(params: Any, optimizer: optax.GradientTransformation) -> State:
    """The state before the first update."""
    return State(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def make_grads(
    loss_sum: Callable[[Any, Any], LossSum],
    *,
    accumulation: int = 1,
    place: Callable[[Any], Any] = lambda grads: grads,
) -> Callable[[Any, Any], tuple[LossSum, Any]]:
    """grads(params, batch) -> (sums, gradients of the objective), nothing divided by the count yet.

    accumulation: the batch is worked on in so many parts, one after another, and their gradients are added
    up in fp32: only one part's activations exist at a time. Each dim 0 of the batch is a multiple of it.
    place: puts such a sum where parameters lie; without it each device might hold all of it.
    """

    def whole(params: Any, batch: Any) -> tuple[LossSum, Any]:
        def objective(params: Any) -> tuple[Array, LossSum]:
            found = loss_sum(params, batch)
            return found.total if found.objective is None else found.objective, found

        grads, found = jax.grad(objective, has_aux=True)(params)
        return found, grads

    def in_parts(params: Any, batch: Any) -> tuple[LossSum, Any]:
        def add(sums: tuple[LossSum, Any], part: Any) -> tuple[tuple[LossSum, Any], None]:
            found, grads = jax.tree.map(
                lambda a, b: a + b.astype(a.dtype), sums, whole(params, part)
            )
            return (found, place(grads)), None

        found, grads = jax.eval_shape(whole, params, parts_of(batch, accumulation, 0))
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), found)
        start = nothing, place(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), grads))
        return lax.scan(add, start, parts_of(batch, accumulation))[0]

    return whole if accumulation == 1 else in_parts


def parts_of(batch: Any, count: int, which: int | None = None) -> Any:
    """Arrays [B, ...] as [count, B / count, ...], or the part `which` of them.

    Part n has the rows n, n + count, ...: of each device's rows as many as of any other's, so none moves.
    """

    def cut(x: Array) -> Array:
        parts = x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
        return parts if which is None else parts[which]

    return jax.tree.map(cut, batch)


def make_step(
    grads_of: Callable[[Any, Any], tuple[LossSum, Any]],
    optimizer: optax.GradientTransformation,
    *,
    skip_norm: float = math.inf,
) -> Callable[[State, Any], tuple[State, dict[str, Array]]]:
    """step(state, batch) -> (state, metrics); `grads_of` as `make_grads` makes it.

    Where the loss or the gradient is not finite, or the gradient's norm (before any clipping) is above
    `skip_norm`, parameters and optimizer stay as they were: the step is skipped, the schedule's count too,
    and `train/skipped` is 1.
    """

    def step(state: State, batch: Any) -> tuple[State, dict[str, Array]]:
        found, sums = grads_of(state.params, batch)
        # A batch of nothing but padding has loss 0 and gradient 0, not 0 / 0.
        count = jnp.maximum(found.targets, 1).astype(jnp.float32)
        loss = found.total / count
        grads = jax.tree.map(
            lambda g, p: (g.astype(jnp.float32) / count).astype(p.dtype), sums, state.params
        )
        norm = optax.tree.norm(grads)
        # Of global values: the same on every host.
        good = jnp.isfinite(loss) & jnp.isfinite(norm) & (norm <= skip_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = optax.apply_updates(state.params, updates), opt_state
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(good, new, old), new, (state.params, state.opt_state)
        )
        metrics = {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/param_norm": optax.tree.norm(params),
            "train/tokens": found.targets,
            "train/skipped": (~good).astype(jnp.int32),
        }
        return State(params, opt_state, state.step + 1), metrics

    return step
