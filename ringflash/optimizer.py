"""The optimizer as an optax chain: clipping, a direction, weight decay, a schedule, and an average.

The direction is AdamW's or Muon's, by name; what comes after it is the same for both. Schedules stand in
`ringflash.schedule`. No part looks at the run's length or at the mesh: state that mirrors the parameters is
laid out as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from ringflash.config import OptimizerConfig
from ringflash.schedule import make_schedule

Array = jax.Array
ADAMS_RMS = 0.2  # of an update of AdamW, times the learning rate (arXiv:2502.16982, section 2.2)

# The matrices that Muon turns: dims that are multiplied with the input, and dims of the output, both counted
# from the last one: there is one of layers in front of them. What is not here is AdamW's.
MATRICES: Mapping[str, MuonDimensionNumbers] = {
    "q_DNH": MuonDimensionNumbers((-3,), (-2, -1)),
    "k_DKH": MuonDimensionNumbers((-3,), (-2, -1)),
    "v_DKH": MuonDimensionNumbers((-3,), (-2, -1)),
    "out_NHD": MuonDimensionNumbers((-3, -2), (-1,)),
    "gate_DF": MuonDimensionNumbers((-2,), (-1,)),
    "up_DF": MuonDimensionNumbers((-2,), (-1,)),
    "down_FD": MuonDimensionNumbers((-2,), (-1,)),
}


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clip by global norm, then direction, weight decay (not of norm scales) and learning rate."""
    update = optax.chain(
        DIRECTIONS[config.name](config),
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale_by_learning_rate(make_schedule(config)),
    )
    clip = optax.clip_by_global_norm(config.clip_norm)
    if config.ema_decay == 0:
        return optax.chain(clip, update)
    return optax.chain(clip, update, average(config.ema_decay))


def decayed(params: Any) -> Any:
    """True for matrices, False for norm scales; layers are stacked, so the name tells, not the rank."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not any("scale" in str(key) for key in path), params
    )


def adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """Adam's; with the decay apart from it, it is AdamW (arXiv:1711.05101)."""
    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2)


def muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """The nearest orthogonal matrix to the momentum, for `MATRICES`, each layer's by itself; else Adam's.

    By five steps of Newton-Schulz, which bring singular values near 1 (arXiv:2409.20325); then as large as
    AdamW's updates are, so that one learning rate and one weight decay serve both (arXiv:2502.16982). Not
    `optax.contrib.muon`, which takes no mask for the decay of Adam's part and gives it Nesterov's momentum.
    """
    matrices = optax.chain(
        by_layer(scale_by_muon(beta=config.momentum, weight_dimension_numbers=numbers)),
        optax.stateless(
            lambda updates, _: jax.tree.map(as_large_as_adam, updates, numbers(updates))
        ),
    )
    return optax.partition({"muon": matrices, "adam": adam(config)}, direction_of)


def by_layer(muon: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same over parameters [L, ...], one layer after another.

    Newton-Schulz needs matrices whole that lie split over devices: only one layer's exist at a time.
    """

    def update(updates: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        def layer(_: Array, of_layer: tuple[Any, Any]) -> tuple[Array, tuple[Any, Any]]:
            grads, mu = of_layer
            turned, after = muon.update(grads, state._replace(mu=mu))
            return after.count, (turned, after.mu)

        count, (turned, mu) = lax.scan(layer, state.count, (updates, state.mu))
        return turned, state._replace(count=count, mu=mu)

    return optax.GradientTransformation(muon.init, update)


def direction_of(params: Any) -> Any:
    """Which direction each parameter goes in, `muon` or `adam`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "muon" if last_name(path) in MATRICES else "adam", params
    )


def numbers(params: Any) -> Any:
    """The entry of `MATRICES` for each of these parameters."""
    return jax.tree_util.tree_map_with_path(lambda path, _: MATRICES[last_name(path)], params)


def last_name(path: tuple[Any, ...]) -> str:
    """A parameter's own name."""
    return str(getattr(path[-1], "key", path[-1]))


def as_large_as_adam(update: Array, dims: MuonDimensionNumbers) -> Array:
    """Orthogonal matrices [m, n] have a root mean square of 1 / sqrt(max(m, n)); here made `ADAMS_RMS`."""
    sides = [math.prod(update.shape[dim] for dim in side) for side in dims]
    return update * (ADAMS_RMS * math.sqrt(max(sides)))


DIRECTIONS: Mapping[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adamw": adam,
    "muon": muon,
}


class Average(NamedTuple):
    """The moving average of the parameters, fp32, and the number of updates that are in it."""

    steps: Array
    mean: Any


def average(decay: float) -> optax.GradientTransformation:
    """Updates as they are; the state keeps the moving average of the parameters that they lead to.

    After t updates that is sum_i decay^(t - i) params_i / sum_i decay^(t - i), i from 1 to t: what was drawn
    at random is not in it. Memory: four bytes a parameter.
    """

    def init(params: Any) -> Average:
        return Average(jnp.zeros((), jnp.int32), jax.tree.map(to_fp32, params))

    def update(updates: Any, state: Average, params: Any = None) -> tuple[Any, Average]:
        steps = state.steps + 1
        share = (1 - decay) / -jnp.expm1(steps * math.log(decay))  # 1 at the first update
        new = optax.apply_updates(params, updates)
        mean = jax.tree.map(lambda m, p: m + share * (to_fp32(p) - m), state.mean, new)
        return updates, Average(steps, mean)

    return optax.GradientTransformation(init, update)


def to_fp32(x: Array) -> Array:
    """The same numbers in fp32."""
    return x.astype(jnp.float32)


def averaged(params: Any, opt_state: Any) -> Any:
    """What to evaluate: the average, in the parameters' dtype, where the state keeps one; else `params`."""
    last = opt_state[-1]
    if not isinstance(last, Average):
        return params
    return jax.tree.map(lambda mean, p: mean.astype(p.dtype), last.mean, params)
