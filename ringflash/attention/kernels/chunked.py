"""Flash attention in plain XLA: loops over tiles, EMPTY tiles never visited, FULL tiles never masked.

The CPU default. For each block of queries the key blocks are put in order, FULL first, then PARTIAL, and
two loops with dynamic bounds run over them, so neither loop holds a branch. Memory is linear in T and S.
Forward: FlashAttention-2 algorithm 1. Backward: keys outside, queries inside, five products a tile,
dk and dv in the carry and dq added in place.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ringflash.attention.axis import alike
from ringflash.attention.kernel import FLOOR, Grads, Kernel, Partial, add_grads
from ringflash.attention.mask import EMPTY, FULL, Span, Tokens, lengthened, spans
from ringflash.attention.spec import Spec
from ringflash.attention.tile import biased, cap_slope, capped, dropped, soften, weights

Array = jax.Array
BLOCK_K = 256  # with `queries_a_tile`, the quickest on two cores (docs/log.md)


class Blocks(NamedTuple):
    """The tokens of one batch row cut in blocks, and the span of each block."""

    at: Tokens  # fields [blocks, block]; heads and the row's seed as they are
    span: Span  # fields [blocks]


def chunked(spec: Spec, *, block_q: int | None = None, block_k: int = BLOCK_K) -> Kernel:
    """Tiles of block_q queries (of each head of a group) x block_k keys; lengths need not divide them."""

    def forward(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, carry: Partial | None = None
    ) -> Partial:
        (_, T, _, H), K = q.shape, k.shape[2]
        bq, bk = block_q or queries_a_tile(T), min(block_k, k.shape[1])
        q_blocks = rows_of(q, K, bq) * spec.scale_for(H)
        k_blocks, v_blocks = rows_of(k, K, bk), rows_of(v, K, bk)
        start = None if carry is None else opened(carry, K, bq)
        xs = (q_blocks, k_blocks, v_blocks, blocks_of(q_at, bq), blocks_of(k_at, bk), start)
        out, lse = lax.map(lambda x: forward_row(spec, *x), xs)
        return Partial(unrow(out, T, bq), unrow(lse, T, bq)[..., 0].swapaxes(1, 2))

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
        (_, T, _, H), (_, S, K, _) = q.shape, k.shape
        bq, bk = block_q or queries_a_tile(T), min(block_k, S)
        stats = [rows_of(x.swapaxes(1, 2)[..., None], K, bq) for x in (lse_BNT, delta_BNT)]
        q_side = (rows_of(q, K, bq) * spec.scale_for(H), rows_of(dout, K, bq), *stats)
        k_side = (rows_of(k, K, bk), rows_of(v, K, bk))
        given = None
        if into is not None and into.dq_BTNH is not None:  # dq goes on from there, in the loop
            given, into = rows_of(into.dq_BTNH, K, bq), into._replace(dq_BTNH=None)
        xs = (q_side, k_side, blocks_of(q_at, bq), blocks_of(k_at, bk), given)
        dq, dk, dv = lax.map(lambda x: backward_row(spec, *x), xs)
        grads = Grads(unrow(dq, T, bq), unrow(dk, S, bk), unrow(dv, S, bk))
        return add_grads(into, grads)

    return Kernel("chunked", spec, forward, backward)


def queries_a_tile(T: int) -> int:
    """256; fewer on a short shard, since tiles are memory too."""
    return min(T, max(128, min(256, T // 8)))


def forward_row(
    spec: Spec, q: Array, k: Array, v: Array, q_at: Blocks, k_at: Blocks, start: Partial | None
) -> tuple[Array, Array]:
    """One batch row: q [nq, K, GT, H], k and v [nk, K, S, H] -> out and lse in q's blocks."""

    def block(x: tuple[Array, Blocks, Partial | None]) -> tuple[Array, Array]:
        q_KXH, at, begin = x

        def step(j: Array, state: tuple[Array, Array, Array], masked: bool) -> tuple:
            top, total, acc = state
            here = nth(k_at.at, j)
            score = by_head(biased, capped(dot(q_KXH, k[j], 2, 2), spec), spec, at.at, here)
            visible = over_group(spec.visible(at.at, here), q_KXH) if masked else None
            p, new = soften(score, top, visible)
            shrink = jnp.exp(top - new)
            total = total * shrink + p.sum(-1, keepdims=True)
            return (
                new,
                total,
                acc * shrink + dot(by_head(dropped, p, spec, at.at, here), v[j], 2, 1),
            )

        if begin is None:
            zero = jnp.zeros((*q_KXH.shape[:-1], 1), jnp.float32)
            state = (zero + FLOOR, zero, jnp.zeros((*q_KXH.shape[:-1], v.shape[-1]), jnp.float32))
        else:
            state = (begin.lse_BNT, (begin.lse_BNT > FLOOR / 2).astype(jnp.float32), begin.out_BTNH)
        state = alike(state, q, k, v, q_at, k_at)
        top, total, acc = over(spec.relation(at.span, k_at.span), step, state)
        seen = total > 0
        lse = jnp.where(seen, top + jnp.log(jnp.where(seen, total, 1.0)), FLOOR)
        return acc / jnp.where(seen, total, 1.0), lse

    return lax.map(block, (q, q_at, start))


def backward_row(
    spec: Spec,
    q_side: tuple[Array, ...],
    k_side: tuple[Array, Array],
    q_at: Blocks,
    k_at: Blocks,
    into: Array | None,
) -> tuple[Array, Array, Array]:
    """One batch row, in blocks as `forward_row` has them -> dq (added to what is given), dk, dv.

    Tiles are [K, S, GT], keys down, and dq is gathered as [K, H, GT]: no product needs a transposed tile.
    """
    q, dout, lse, delta = q_side  # lse and delta [nq, K, GT, 1]
    scale = spec.scale_for(q.shape[-1])

    def block(dq_KHX: Array, x: tuple[Array, Array, Blocks]) -> tuple[Array, tuple[Array, Array]]:
        k_KSH, v_KSH, at = x
        k_KHS = k_KSH.swapaxes(1, 2) * scale  # q has the scale already, for the scores and for dk

        def step(i: Array, state: tuple[Array, Array, Array], masked: bool) -> tuple:
            dq, dk, dv = state
            here = nth(q_at.at, i)
            cap = capped(dot(k_KSH, q[i], 2, 2), spec)
            score = by_head(biased, cap, spec, here, at.at, turned=True)
            visible = over_group(spec.visible(here, at.at), q[i]).T if masked else None
            p = weights(score, lse[i].swapaxes(1, 2), visible)
            dp = by_head(dropped, dot(v_KSH, dout[i], 2, 2), spec, here, at.at, turned=True)
            ds = p * (dp - delta[i].swapaxes(1, 2)) * cap_slope(cap, spec)
            dv = dv + dot(by_head(dropped, p, spec, here, at.at, turned=True), dout[i], 2, 1)
            return dq.at[i].add(dot(k_KHS, ds, 2, 1)), dk + dot(ds, q[i], 2, 1), dv

        zeros = [jnp.zeros(x.shape, jnp.float32) for x in (k_KSH, v_KSH)]
        dq_KHX, dk, dv = over(
            spec.relation(q_at.span, at.span), step, (dq_KHX, *alike(zeros, dq_KHX))
        )
        return dq_KHX, (dk, dv)

    start = jnp.zeros(q.shape, jnp.float32) if into is None else into
    start = alike(start, q_side, k_side, q_at, k_at)
    dq, (dk, dv) = lax.scan(block, start.swapaxes(2, 3), (*k_side, k_at))
    return dq.swapaxes(2, 3), dk, dv


def dot(a: Array, b: Array, a_dim: int, b_dim: int) -> Array:
    """The product over a_dim and b_dim, batched over K, in fp32."""
    dims = (((a_dim,), (b_dim,)), ((0,), (0,)))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def by_head(f, x, spec: Spec, q_at: Tokens, k_at: Tokens, turned: bool = False):  # type: ignore[no-untyped-def]
    """A function of `tile`, which knows query heads, on a tile [K, GT, S] (or [K, S, GT], turned)."""
    if spec.bias is None and not spec.dropout:
        return x
    rows = x.swapaxes(1, 2) if turned else x
    t = q_at.positions_BT.shape[-1]
    done = f(rows.reshape(rows.shape[0], -1, t, rows.shape[2]), spec, q_at, k_at).reshape(
        rows.shape
    )
    return done.swapaxes(1, 2) if turned else done


def over_group(visible_TS: Array, q_KXH: Array) -> Array:
    """[GT, S]: the same for each query head of the group."""
    group = q_KXH.shape[1] // visible_TS.shape[0]
    return jnp.tile(visible_TS, (group, 1))


def over(relation: Array, step, state):  # type: ignore[no-untyped-def]
    """Run `step(index, state, masked)` over the FULL blocks, then the PARTIAL ones."""
    order = jnp.argsort(-relation)
    full, some = (relation == FULL).sum(), (relation > EMPTY).sum()
    state = lax.fori_loop(0, full, lambda n, s: step(order[n], s, False), state)
    return lax.fori_loop(full, some, lambda n, s: step(order[n], s, True), state)


def rows_of(x_BTNH: Array, kv_heads: int, block: int) -> Array:
    """[B, T, N, H] -> fp32 [B, blocks, K, G * block, H], padded with zeros to whole blocks."""
    B, T, N, H = x_BTNH.shape
    x = jnp.pad(x_BTNH, ((0, 0), (0, -T % block), (0, 0), (0, 0))).astype(jnp.float32)
    x = x.reshape(B, -1, block, kv_heads, N // kv_heads, H).transpose(0, 1, 3, 4, 2, 5)
    return x.reshape(*x.shape[:3], -1, H)


def unrow(x: Array, length: int, block: int) -> Array:
    """The inverse of `rows_of`, cut to `length`: [B, length, N, H]."""
    B, blocks, K, X, H = x.shape
    x = x.reshape(B, blocks, K, X // block, block, H).transpose(0, 1, 4, 2, 3, 5)
    return x.reshape(B, blocks * block, -1, H)[:, :length]


def blocks_of(at: Tokens, block: int) -> Blocks:
    """The tokens in blocks; what is added at the end is padding. Each block has heads and seed."""
    at = lengthened(at, -at.positions_BT.shape[1] % block)
    positions, segments = at[:2]
    B, length = positions.shape
    blocks = length // block
    span = spans(Tokens(positions, segments), blocks)
    heads, seeds = at.heads_N, at.seeds_B
    if heads is not None:
        heads = jnp.broadcast_to(heads, (B, blocks, *heads.shape))
    if seeds is not None:
        seeds = jnp.broadcast_to(seeds[:, None], (B, blocks))
    shape = (B, blocks, block)
    return Blocks(Tokens(positions.reshape(shape), segments.reshape(shape), heads, seeds), span)


def opened(carry: Partial, kv_heads: int, block: int) -> Partial:
    """A Partial in the blocks of q: lse as [..., block, 1]."""
    lse = carry.lse_BNT.swapaxes(1, 2)[..., None]
    return Partial(rows_of(carry.out_BTNH, kv_heads, block), rows_of(lse, kv_heads, block))


def nth(at: Tokens, j: Array) -> Tokens:
    """The tokens of block j."""
    return jax.tree.map(lambda x: x[j], at)
