"""What one tile computes, apart from the loop that visits tiles: scores, and their gradient.

Shapes here are [..., t, s]: any leading dims (batch, kv heads), t query rows, s keys. Scores are fp32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ringflash.attention.kernel import FLOOR, Spec

Array = jax.Array


def scores(raw_ts: Array, spec: Spec) -> Array:
    """From scaled products q.k to scores: the soft cap."""
    if spec.softcap is None:
        return raw_ts
    return spec.softcap * jnp.tanh(raw_ts / spec.softcap)


def score_slope(score_ts: Array, spec: Spec) -> Array | float:
    """d score / d raw, from the score: 1 - (score / cap)^2."""
    if spec.softcap is None:
        return 1.0
    return 1.0 - jnp.square(score_ts / spec.softcap)


def soften(score_ts: Array, top_t1: Array, visible_ts: Array | None) -> tuple[Array, Array]:
    """exp(score - new row maximum) with zero where invisible, and that maximum [..., t, 1]."""
    if visible_ts is not None:
        score_ts = jnp.where(visible_ts, score_ts, FLOOR)
    top = jnp.maximum(top_t1, score_ts.max(-1, keepdims=True))
    return weights(score_ts, top, visible_ts), top


def weights(score_ts: Array, lse_t1: Array, visible_ts: Array | None) -> Array:
    """exp(score - lse), zero where invisible (a row that sees nothing has lse FLOOR, not -inf)."""
    p = jnp.exp(score_ts - lse_t1)
    return p if visible_ts is None else jnp.where(visible_ts, p, 0.0)
