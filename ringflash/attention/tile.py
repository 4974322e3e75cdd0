"""What one tile computes, apart from the loop that visits tiles: scores, dropout, and their gradients.

Arrays are [K, G, t, s] or have a batch dim in front: t query rows of a group of G query heads against s
keys. Scores are fp32. `q_at` and `k_at` are the tokens of the tile, fields [..., t] and [..., s].
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ringflash.attention.kernel import FLOOR
from ringflash.attention.mask import Tokens
from ringflash.attention.spec import Bias, Spec, facing

Array = jax.Array
LOG2E = 1.4426950408889634
HIDDEN = 2 * FLOOR * LOG2E


def capped(raw_ts: Array, spec: Spec) -> Array:
    """The soft cap of scaled products q.k."""
    return raw_ts if spec.softcap is None else spec.softcap * jnp.tanh(raw_ts / spec.softcap)


def cap_slope(capped_ts: Array, spec: Spec) -> Array | float:
    """d capped / d raw, from the capped value: 1 - (capped / softcap)^2."""
    return 1.0 if spec.softcap is None else 1.0 - jnp.square(capped_ts / spec.softcap)


def biased(capped_ts: Array, spec: Spec, q_at: Tokens, k_at: Tokens) -> Array:
    """Scores: the bias of each query, key and head added."""
    if spec.bias is None:
        return capped_ts
    q_t1, k_1s = facing(q_at, k_at)
    q, k = (x.positions_BT[..., None, None, :, :] for x in (q_t1, k_1s))
    return capped_ts + spec.bias(q, k, heads_of(q_at, capped_ts)).astype(capped_ts.dtype)


def seen(
    tests: tuple[str, ...], lo: Array, hi: Array, position: Array, same_segment: Callable[[], Array]
) -> Array | None:
    """Which pairs pass the tests (see `kernels.mosaic.agenda`): queries' bounds against keys' positions.

    Both bounds are one comparison: position - lo <= hi - lo, unsigned, since lo <= hi. None: no test.
    """
    passed: Array | None = None
    if "hi" in tests and "lo" in tests:
        passed = (position - lo).astype(jnp.uint32) <= (hi - lo).astype(jnp.uint32)
    elif "hi" in tests:
        passed = position <= hi
    elif "lo" in tests:
        passed = position >= lo
    if "segment" in tests:
        passed = same_segment() if passed is None else passed & same_segment()
    return passed


def in_base_2(raw: Array, softcap: float | None) -> Array:
    """Scores times log2(e), from products whose q was multiplied by `query_factor`."""
    return raw if softcap is None else jnp.tanh(raw) * (softcap * LOG2E)


def query_factor(spec: Spec, head_dim: int) -> float:
    """What q is multiplied by before the product: scale, and log2(e) or 1 / softcap."""
    return spec.scale_for(head_dim) * beside_scale(spec)


def beside_scale(spec: Spec) -> float:
    """What q is multiplied by beside the scale."""
    return LOG2E if spec.softcap is None else 1 / spec.softcap


def hidden(score: Array, visible: Array | None) -> Array:
    """Scores with HIDDEN where invisible: exp2(HIDDEN - m) is 0 for every m, even that of an empty row."""
    return score if visible is None else jnp.where(visible, score, HIDDEN)


def score_gradient(p: Array, dp: Array, delta: Array, raw: Array, softcap: float | None) -> Array:
    """d loss / d (scaled product), before the cap: p (dp - delta), times the slope of the cap."""
    ds = p * (dp - delta)
    return ds if softcap is None else ds * (1.0 - jnp.square(jnp.tanh(raw)))


def heads_of(q_at: Tokens, x_KGts: Array) -> Array:
    """The ids of the query heads as [K, G, 1, 1], with a batch dim of 1 in front where x has one."""
    assert q_at.heads_N is not None, "bias and dropout need q_at.heads_N"
    K, G = x_KGts.shape[-4:-2]
    return q_at.heads_N.reshape(*(1,) * (x_KGts.ndim - 4), K, G, 1, 1)


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


def dropped(x_ts: Array, spec: Spec, q_at: Tokens, k_at: Tokens) -> Array:
    """x with a share of its entries zero and the rest scaled up: for p forward, for dp backward."""
    if not spec.dropout:
        return x_ts
    q_t1, k_1s = facing(q_at, k_at)
    assert q_at.seeds_B is not None, "dropout needs q_at.seeds_B"
    word = q_at.seeds_B[..., None, None, None, None]
    for part in (q_t1.segment_ids_BT, q_t1.positions_BT, k_1s.positions_BT):
        word = scrambled(word ^ part[..., None, None, :, :].astype(jnp.uint32))
    word = scrambled(word ^ heads_of(q_at, x_ts).astype(jnp.uint32))
    keep = word >= jnp.uint32(int(spec.dropout * 2**32))
    return jnp.where(keep, x_ts / (1.0 - spec.dropout), 0.0)


def scrambled(word: Array) -> Array:
    """The finalizer of MurmurHash3 with an odd offset: each bit of the result depends on every bit."""
    word = word + jnp.uint32(0x9E3779B9)
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def alibi(heads: int) -> Bias:
    """-slope * distance with slopes 2^(-8 i / heads), i = 1 ... heads (arXiv:2108.12409)."""

    def bias(q: Array, k: Array, head: Array) -> Array:
        slope = jnp.exp2(-8.0 * (head + 1).astype(jnp.float32) / heads)
        return -slope * jnp.abs(q - k).astype(jnp.float32)

    return bias
