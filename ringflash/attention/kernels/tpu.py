"""Flash attention for TPU in Pallas: the kernels of `mosaic`, forward and backward, behind the contract.

Here: arrays into tiles and back, tile sizes for what is asked, and what it cannot serve. Heads go before time and
V and the Partial travel with the width before time, which XLA does in the pass that makes or casts them anyway.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ringflash.attention.axis import alike
from ringflash.attention.kernel import Grads, Kernel, Partial, Request, Spec
from ringflash.attention.kernels.mosaic import forward as ahead
from ringflash.attention.kernels.mosaic.agenda import (
    Tests,
    agenda,
    key_rows,
    query_rows,
    tests_of_tiles,
)
from ringflash.attention.kernels.mosaic.tiles import Tiles
from ringflash.attention.mask import Tokens, lengthened
from ringflash.attention.tile import query_factor

Array = jax.Array


def tpu(spec: Spec, *, tiles: Tiles | None = None, interpret: Any = False) -> Kernel:
    def forward(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, carry: Partial | None = None
    ) -> Partial:
        (B, T, N, H), (_, S, K, V) = q.shape, v.shape
        t = tiles
        bq, bk = t.block_q, t.block_k
        sub, heads = t.held, N // K
        q_at, k_at = (lengthened(Tokens(*at[:2]), -n % b) for at, n, b in ((q_at, T, bq * sub), (k_at, S, bk)))
        q = (q.astype(jnp.float32) * query_factor(spec, H)).astype(q.dtype)
        nq, nk = q_at.positions_BT.shape[1] // bq, k_at.positions_BT.shape[1] // bk
        tests = Tests.of(spec)
        lists = agenda(tests_of_tiles(spec, tests, q_at, k_at, nq, nk), sub, look=nq // sub)
        x = ahead.Inputs(
            heads_first(q, bq, sub), heads_first(k, bk), heads_first(v, bk).swapaxes(3, 4),
            jnp.stack([r.reshape(B, nq, bq) for r in query_rows(spec, q_at)], 2),
            jnp.stack([r.reshape(B, nk, bk) for r in key_rows(k_at)[1:]], 2),
        )
        given = None
        if carry is not None:
            given = heads_first(carry.out_BTNH, bq, sub).swapaxes(3, 4), heads_first(carry.lse_BNT.swapaxes(1,2)[..., None], bq, sub).swapaxes(3,4)
        out, lse = ahead.forward(x, given, lists=lists, tests=tests, softcap=spec.softcap, heads=heads, sub=sub, chunk=t.chunk,
            options=dict(name="ringflash_forward", interpret=interpret,
              compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)*3+("arbitrary",))))
        out = out.swapaxes(3, 4).reshape(B, N, -1, V)[:, :, :T].swapaxes(1, 2)
        return Partial(out, lse.reshape(B, N, -1)[..., :T])
    return Kernel("tpu", spec, forward, None)

def heads_first(x: Array, block: int, sub: int = 1) -> Array:
    """[B, n, heads, width] -> [B, heads, tiles, block, width], padded with zeros to whole steps."""
    B, n, heads, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, -n % (block * sub)), (0, 0), (0, 0)))
    return x.swapaxes(1, 2).reshape(B, heads, -1, block, width)
