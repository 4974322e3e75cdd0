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

from ringflash.attention.kernel import FLOOR, Grads, Kernel, Partial, Spec, add_grads
from ringflash.attention.mask import EMPTY, FULL, PADDING, Span, Tokens, spans
from ringflash.attention.tile import biased, cap_slope, capped, dropped, soften, weights

Array = jax.Array


class Blocks(NamedTuple):
    """The tokens of one batch row cut in blocks, and the span of each block."""

    at: Tokens  # fields [blocks, block]; heads and the row's seed as they are
    span: Span  # fields [blocks]


def chunked(spec: Spec, *, block_q: int | None = None, block_k: int = 128) -> Kernel:
    """Tiles of block_q queries (of each head of a group) x block_k keys; lengths need not divide them."""

    def forward(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, carry: Partial | None = None
    ) -> Partial:
        (_, T, _, H), K = q.shape, k.shape[2]
        bq, bk = block_q or queries_a_tile(T, q.shape[2] // K), min(block_k, k.shape[1])
        q_blocks = rows_of(q, K, bq) * spec.scale_for(H)
        k_blocks, v_blocks = rows_of(k, K, bk), rows_of(v, K, bk)
        start = None if carry is None else opened(carry, K, bq)
        xs = (q_blocks, k_blocks, v_blocks, blocks_of(q_at, bq), blocks_of(k_at, bk), start)
        out, lse = lax.map(lambda x: forward_row(spec, *x), xs)
        return Partial(unrow(out, T), unrow(lse, T)[..., 0].swapaxes(1, 2))

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
        bq, bk = block_q or queries_a_tile(T, q.shape[2] // K), min(block_k, S)
        stats = [rows_of(x.swapaxes(1, 2)[..., None], K, bq) for x in (lse_BNT, delta_BNT)]
        q_side = (rows_of(q, K, bq) * spec.scale_for(H), rows_of(dout, K, bq), *stats)
        k_side = (rows_of(k, K, bk), rows_of(v, K, bk))
        given = None
        if into is not None and into.dq_BTNH is not None:  # dq goes on from there, in the loop
            given, into = rows_of(into.dq_BTNH, K, bq), into._replace(dq_BTNH=None)
        xs = (q_side, k_side, blocks_of(q_at, bq), blocks_of(k_at, bk), given)
        dq, dk, dv = lax.map(lambda x: backward_row(spec, *x), xs)
        grads = Grads(unrow(dq, T), unrow(dk, S), unrow(dv, S))
        return add_grads(into, grads)

    return Kernel("chunked", spec, forward, backward)


def queries_a_tile(T: int, G: int) -> int:
    """512 rows a tile over the group: large enough for both cores, small enough for the cache.

    Measured on two cores (docs/log.md). On a short shard an eighth of it, since tiles are memory too.
    """
    return min(T, max(128, min(512 // G, T // 8)))


def forward_row(
    spec: Spec, q: Array, k: Array, v: Array, q_at: Blocks, k_at: Blocks, start: Partial | None
) -> tuple[Array, Array]:
    """One batch row: q [nq, K, G, bq, H], k and v [nk, K, 1, bk, H] -> out and lse in q's blocks."""

    def block(x: tuple[Array, Blocks, Partial | None]) -> tuple[Array, Array]:
        q_KGTH, at, begin = x

        def step(j: Array, state: tuple[Array, Array, Array], masked: bool) -> tuple:
            top, total, acc = state
            here = nth(k_at.at, j)
            score = biased(capped(products(q_KGTH, k[j]), spec), spec, at.at, here)
            p, new = soften(score, top, spec.visible(at.at, here) if masked else None)
            shrink = jnp.exp(top - new)
            total = total * shrink + p.sum(-1, keepdims=True)
            return new, total, acc * shrink + mixed(dropped(p, spec, at.at, here), v[j])

        if begin is None:
            zero = jnp.zeros((*q_KGTH.shape[:-1], 1), jnp.float32)
            state = (zero + FLOOR, zero, jnp.zeros((*q_KGTH.shape[:-1], v.shape[-1]), jnp.float32))
        else:
            state = (begin.lse_BNT, (begin.lse_BNT > FLOOR / 2).astype(jnp.float32), begin.out_BTNH)
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
    """One batch row, in blocks as `forward_row` has them -> dq (added to what is given), dk, dv."""
    q, dout, lse, delta = q_side
    scale = spec.scale_for(q.shape[-1])

    def block(dq: Array, x: tuple[Array, Array, Blocks]) -> tuple[Array, tuple[Array, Array]]:
        k_K1SH, v_K1SH, at = x
        scaled_k_K1SH = k_K1SH * scale  # q has the scale already, for the scores and for dk

        def step(i: Array, state: tuple[Array, Array, Array], masked: bool) -> tuple:
            dq, dk, dv = state
            here = nth(q_at.at, i)
            cap = capped(products(q[i], k_K1SH), spec)
            visible = spec.visible(here, at.at) if masked else None
            p = weights(biased(cap, spec, here, at.at), lse[i], visible)
            dp = dropped(products(dout[i], v_K1SH), spec, here, at.at)
            ds = p * (dp - delta[i]) * cap_slope(cap, spec)
            dv = dv + gathered(dropped(p, spec, here, at.at), dout[i])
            dk = dk + gathered(ds, q[i])
            return dq.at[i].add(mixed(ds, scaled_k_K1SH)), dk, dv

        zeros = [jnp.zeros(x.shape, jnp.float32) for x in (k_K1SH, v_K1SH)]
        dq, dk, dv = over(spec.relation(q_at.span, at.span), step, (dq, *zeros))
        return dq, (dk, dv)

    start = jnp.zeros(q.shape, jnp.float32) if into is None else into
    dq, (dk, dv) = lax.scan(block, start, (*k_side, k_at))
    return dq, dk, dv


def over(relation: Array, step, state):  # type: ignore[no-untyped-def]
    """Run `step(index, state, masked)` over the FULL blocks, then the PARTIAL ones."""
    order = jnp.argsort(-relation)
    full, some = (relation == FULL).sum(), (relation > EMPTY).sum()
    state = lax.fori_loop(0, full, lambda n, s: step(order[n], s, False), state)
    return lax.fori_loop(full, some, lambda n, s: step(order[n], s, True), state)


def products(a_KGTH: Array, b_K1SH: Array) -> Array:
    """a.b over the head width, fp32: [K, G, t, s]."""
    return jnp.einsum("kgth,ksh->kgts", a_KGTH, b_K1SH[:, 0], preferred_element_type=jnp.float32)


def mixed(p_KGTS: Array, x_K1SH: Array) -> Array:
    """Rows of x weighted by p, fp32: [K, G, t, H]."""
    return jnp.einsum("kgts,ksh->kgth", p_KGTS, x_K1SH[:, 0], preferred_element_type=jnp.float32)


def gathered(p_KGTS: Array, x_KGTH: Array) -> Array:
    """Rows of x weighted by p transposed, summed over the group, fp32: [K, 1, s, H]."""
    summed = jnp.einsum("kgts,kgth->ksh", p_KGTS, x_KGTH, preferred_element_type=jnp.float32)
    return summed[:, None]


def rows_of(x_BTNH: Array, kv_heads: int, block: int) -> Array:
    """[B, T, N, H] -> fp32 [B, blocks, K, G, block, H], padded with zeros to whole blocks."""
    B, T, N, H = x_BTNH.shape
    x = jnp.pad(x_BTNH, ((0, 0), (0, -T % block), (0, 0), (0, 0))).astype(jnp.float32)
    x = x.reshape(B, -1, block, kv_heads, N // kv_heads, H)
    return x.transpose(0, 1, 3, 4, 2, 5)


def unrow(x: Array, length: int) -> Array:
    """The inverse of `rows_of`, cut to `length`: [B, length, N, H]."""
    B, blocks, K, G, block, H = x.shape
    x = x.transpose(0, 1, 4, 2, 3, 5).reshape(B, blocks * block, K * G, H)
    return x[:, :length]


def blocks_of(at: Tokens, block: int) -> Blocks:
    """The tokens in blocks; what is added at the end is padding. Each block has heads and seed."""
    pad = ((0, 0), (0, -at.positions_BT.shape[1] % block))
    positions = jnp.pad(at.positions_BT, pad)
    segments = jnp.pad(at.segment_ids_BT, pad, constant_values=PADDING)
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
