"""One update, jitted by whoever assembles it. The loss is a global sum over a global count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Array = jax.Array


class State(NamedTuple):
    """What a run is: parameters, optimizer state, and the number of updates made."""

    params: Any
    opt_state: Any
    step: Array


class LossSum(NamedTuple):
    """Sum of losses in nats, fp32, and the number of targets that count, int32; both global."""

    total: Array
    targets: Array


def init_state(params: Any, optimizer: optax.GradientTransformation) -> State:
    """The state before the first update."""
    return State(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def make_step(
    loss_sum: Callable[[Any, Any], LossSum], optimizer: optax.GradientTransformation
) -> Callable[[State, Any], tuple[State, dict[str, Array]]]:
    """step(state, batch) -> (state, metrics), where `loss_sum(params, batch)` is differentiated."""

    def mean(params: Any, batch: Any) -> tuple[Array, LossSum]:
        found = loss_sum(params, batch)
        # A batch of nothing but padding has loss 0 and gradient 0, not 0 / 0.
        return found.total / jnp.maximum(found.targets, 1), found

    def step(state: State, batch: Any) -> tuple[State, dict[str, Array]]:
        (loss, found), grads = jax.value_and_grad(mean, has_aux=True)(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "train/loss": loss,
            "train/grad_norm": optax.tree.norm(grads),
            "train/param_norm": optax.tree.norm(params),
            "train/tokens": found.targets,
        }
        return State(params, opt_state, state.step + 1), metrics

    return step
